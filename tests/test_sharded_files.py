"""What is read from another user's run is data: nothing in it can run."""

from __future__ import annotations

import os
import pickle
import subprocess
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
)

from omnirl_hpc.checkpoints.checkpointer import load_weights
from omnirl_hpc.errors import CheckpointError
from omnirl_hpc.sharded_files import TensorFileReader, reading


def tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.ones(3, 4),
        "b.exp_avg": torch.ones(3, dtype=torch.bfloat16),
        "step": torch.tensor(7.0),
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    dcp.save(tensors(), storage_writer=dcp.FileSystemWriter(tmp_path / "saved"), no_dist=True)
    return tmp_path / "saved"


def load(folder: Path) -> dict[str, torch.Tensor]:
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    with reading(str(folder), CheckpointError):
        dcp.load(loaded, storage_reader=TensorFileReader(folder), no_dist=True)
    return loaded


class Command:
    """Unpickled, it runs a command."""

    def __init__(self, *call) -> None:
        self._call = call

    def __reduce__(self):
        return self._call


def test_tensors_are_read(folder):
    loaded = load(folder)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda mark: (os.system, (f"touch {mark}",)), "posix.system"),
        (lambda mark: (subprocess.check_call, (["touch", str(mark)],)), "subprocess.check_call"),
        (lambda mark: (eval, (f"open({str(mark)!r}, 'w')",)), "builtins.eval"),
        (lambda mark: (torch.save, (0, str(mark))), "torch.serialization.save"),
    ],
)
def test_a_command_in_the_metadata_is_refused(folder, tmp_path, call, named):
    mark = tmp_path / "mark"
    hostile = pickle.dumps(Command(*call(mark)))
    pickle.loads(hostile)
    assert mark.exists()  # torch's own reader would have run it
    mark.unlink()
    (folder / ".metadata").write_bytes(hostile)
    (folder / "__0.metadata").write_bytes(hostile)  # where torch looks next
    with pytest.raises(CheckpointError, match=f"{folder} cannot be read: .*metadata asks for {named}, which"):
        load(folder)
    assert not mark.exists()


class Older(pickle.Pickler):
    """Writes members of an enumeration as Python 3.11.0 to 3.11.4 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_what_an_older_python_wrote_is_read(folder):
    metadata = dcp.FileSystemReader(folder).read_metadata()
    with (folder / ".metadata").open("wb") as file:
        Older(file).dump(metadata)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert all(torch.equal(load(folder)[name], tensor) for name, tensor in tensors().items())


@pytest.mark.parametrize(("owner", "name"), [(Metadata, "mro"), (_MEM_FORMAT_ENCODING, "mro")])
def test_nothing_else_has_its_attributes_read(folder, owner, name):
    (folder / ".metadata").write_bytes(pickle.dumps(Command(getattr, (owner, name))))
    with pytest.raises(CheckpointError, match=f"asks for {name} of <.*>, which no checkpoint"):
        load(folder)


def test_a_command_in_an_entry_that_is_no_tensor_is_refused(folder, tmp_path):
    """Torch unpickles the bytes of such an entry without a limit."""
    mark = tmp_path / "mark"
    metadata = dcp.FileSystemReader(folder).read_metadata()
    metadata.state_dict_metadata["a"] = BytesStorageMetadata()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "__0_0.distcp").write_bytes(pickle.dumps(Command(os.system, (f"touch {mark}",))))
    with pytest.raises(
        CheckpointError, match="asks for torch.distributed.checkpoint.metadata.BytesStorageMetadata, which"
    ):
        load(folder)
    assert not mark.exists()


def test_files_elsewhere_are_refused(folder):
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for stored in metadata.storage_data.values():
        stored.relative_path = "../other"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="names the file ../other, which is not beside it"):
        load(folder)


def test_the_tensors_own_file_is_data(folder, tmp_path):
    mark = tmp_path / "mark"
    torch.save(Command(os.system, (f"touch {mark}",)), folder / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=f"{folder} cannot be read: "):
        load(folder)
    assert not mark.exists()


def test_exported_weights_are_read_so(tmp_path):
    module, mark = torch.nn.Linear(2, 3), tmp_path / "mark"
    dcp.save(dict(module.named_parameters()), checkpoint_id=tmp_path / "step/optimizer", no_dist=True)
    load_weights(tmp_path / "step", {"transformer": module})
    (tmp_path / "step/optimizer/.metadata").write_bytes(pickle.dumps(Command(os.system, (f"touch {mark}",))))
    with pytest.raises(
        CheckpointError, match="the weights in .* cannot be read: .*asks for posix.system, which"
    ):
        load_weights(tmp_path / "step", {"transformer": module})
    assert not mark.exists()


def test_no_other_reader_of_pickles_is_used():
    """Of all that unpickles, only this module's reader may appear in the package."""
    package = Path(__file__).parent.parent / "omnirl_hpc"
    for file in package.rglob("*.py"):
        text = file.read_text()
        if file.name != "sharded_files.py":
            for word in (
                "import pickle",
                "torch.load(",
                "FileSystemReader(",
                "checkpoint_id=",
                "allow_pickle",
            ):
                assert word not in text.replace("TensorFileReader(", ""), f"{file}: {word}"
