"""Hashes that are the same in every process, on every machine and on every device."""

from __future__ import annotations

import hashlib
import json
from typing import Iterable, Mapping

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def stable_hash(*identity: int | str) -> int:
    """A 63-bit number from an identity."""
    text = json.dumps(identity, separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def tensor_checksum(tensor: Tensor) -> int:
    """A 64-bit checksum of shape, dtype and bits.

    Computed where the tensor is, in exact integer arithmetic: its bits as integers, each times an odd number that depends on
    its place, summed modulo 2^64. So CPU and GPU agree, and nothing is copied.
    """
    tensor = tensor.detach().contiguous()
    bits = tensor.view(_BITS[tensor.element_size()]).flatten().to(torch.int64)
    weights = torch.arange(bits.numel(), device=bits.device) * 0x1E3779B97F4A7C15 | 1
    header = stable_hash(str(tuple(tensor.shape)), str(tensor.dtype))
    return (int((bits * weights).sum()) + header) % 2**64


def state_checksum(state: Mapping[str, Tensor]) -> str:
    """A checksum of a state dict: names and tensors, whatever their order."""
    return stream_checksum(state.items())


def stream_checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The same of tensors that come one at a time."""
    return combined_checksum({name: tensor_checksum(tensor) for name, tensor in tensors})


def combined_checksum(checksums: Mapping[str, int]) -> str:
    """The same from the checksum of each tensor."""
    total = 0
    for name in sorted(checksums):
        total = (total * 1_000_003 + stable_hash(name) + checksums[name]) % 2**64
    return f"{total:016x}"
