"""Weights from a model's files into the ranks' shards: each rank reads its own part of a tensor, one tensor
after the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from omnirl_hpc.errors import DataError
from omnirl_hpc.models.lora import base_tensors
from omnirl_hpc.sharded_files import reading


def fill_from_files(transformer: nn.Module, folder: Path, device: torch.device) -> None:
    """Give a transformer whose parameters are on the meta device, sharded or not, the values in `folder`'s
    *.safetensors.

    The host never holds more than a rank's part of one tensor. An adapter's parameters are left without
    values. Not collective. Raises DataError where the files have other tensors than the transformer, or the
    same one twice, and where they cannot be read.
    """
    buffers = {name: buffer.clone() for name, buffer in transformer.named_buffers()}
    transformer.to_empty(device=device)
    for name, buffer in transformer.named_buffers():
        buffer.copy_(buffers[name])
    wanted = base_tensors(transformer.state_dict())
    reader = HuggingFaceStorageReader(str(folder))
    try:
        found = reader.read_metadata().state_dict_metadata
    except (OSError, SafetensorError) as error:
        raise DataError(f"the weights in {folder} cannot be read: {error}") from None
    # *.safetensors hold nothing but tensors
    _require_same(wanted, cast("dict[str, TensorStorageMetadata]", found), folder)
    with reading(f"the weights in {folder}", DataError):
        dcp.load(wanted, storage_reader=reader, no_dist=True)


def _require_same(
    wanted: dict[str, torch.Tensor], found: dict[str, TensorStorageMetadata], folder: Path
) -> None:
    faults = [f"{name} is missing" for name in wanted if name not in found]
    faults += [f"{name} is in the files and not in the model" for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        if len(found[name].chunks) > 1:
            faults.append(f"{name} is there twice")
        elif found[name].size != wanted[name].shape:
            faults.append(f"{name} is {tuple(found[name].size)}, the model has {tuple(wanted[name].shape)}")
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise DataError(
            f"the weights in {folder} are not those of its config.json: {'; '.join(sorted(faults)[:3])}{more}"
        )
