"""Torch's sharded files (torch.distributed.checkpoint), read so that nothing in them can run.

Its reader unpickles `.metadata`, and a pickle may name any function for the reader to call. A run's folder
may be another user's: what is read from it is data.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta

from omnirl_hpc.errors import OmniRLError

# What the metadata of tensors consists of. Not BytesStorageMetadata: torch unpickles, without a limit, what
# that describes.
ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}


class RefusedError(pickle.UnpicklingError):
    """Metadata names something that no checkpoint of tensors needs."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in ALLOWED:
            raise RefusedError(f".metadata asks for {module}.{name}, which no checkpoint of tensors needs")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    """What Python 3.11.0 to 3.11.4 writes `getattr` for: the member of an enumeration."""
    if kind is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise RefusedError(f".metadata asks for {name} of {kind}, which no checkpoint of tensors needs")
    return _MEM_FORMAT_ENCODING[name]


class TensorFileReader(FileSystemReader):
    """Torch's reader, which reads the tensors' own files with weights_only, for folders of tensors alone."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with Path(self._get_metadata_path(kwargs.get("rank"))).open("rb") as file:
            metadata = _Unpickler(file).load()
        _require_own_files(metadata)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def _require_own_files(metadata: Metadata) -> None:
    """Raise RefusedError for tensors whose files do not lie in the folder itself."""
    for stored in metadata.storage_data.values():
        if Path(stored.relative_path).name != stored.relative_path or stored.transform_descriptors:
            raise RefusedError(f".metadata names the file {stored.relative_path}, which is not beside it")


@contextmanager
def reading(what: str, kind: type[OmniRLError]) -> Iterator[None]:
    """Raise `kind`, in one sentence about `what`, for torch's CheckpointException, which is no Exception.

    Its warning that there is no process group is left out: that is meant.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
            )
            yield
    except CheckpointException as failure:
        raise kind(f"{what} cannot be read: {describe(failure)}") from None


def describe(failure: BaseException) -> str:
    """One line; of a CheckpointException, its first rank's cause."""
    if isinstance(failure, CheckpointException):
        failure = next(iter(failure.failures.values()))[0]
    lines = [line for line in str(failure).splitlines() if line.strip()]
    return f"{type(failure).__name__}: {lines[0] if lines else ''}"
