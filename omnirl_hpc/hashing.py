"""Hashes that are the same in every process, on every machine and on every device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def stable_hash(*identity: int | str) -> int:
    """A 63-bit number from an identity."""
    text = json.dumps(identity, separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def tensor_checksum(tensor: Tensor) -> int:
    """A 64-bit checksum of shape, dtype and bits.

    Computed where the tensor is, in exact integer arithmetic: its bits as integers, each times an odd number
    that depends on its place, summed modulo 2^64. So CPU and GPU agree, and nothing is copied.
    """
    return (int(_weighted_sum(tensor, _weights(tensor.numel(), tensor.device))) + _header(tensor)) % 2**64


def state_checksum(state: Mapping[str, Tensor]) -> str:
    """A checksum of a state dict: names and tensors, whatever their order. All are on one device, which is
    waited for once.
    """
    weights = {n: _weights(n, device) for n, device in {(t.numel(), t.device) for t in state.values()}}
    sums = [_weighted_sum(tensor, weights[tensor.numel()]) for tensor in state.values()]
    totals = torch.stack(sums).tolist() if sums else []
    return combined_checksum(
        {name: (total + _header(state[name])) % 2**64 for name, total in zip(state, totals)}
    )


def stream_checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The same of tensors that come one at a time."""
    return combined_checksum({name: tensor_checksum(tensor) for name, tensor in tensors})


def combined_checksum(checksums: Mapping[str, int]) -> str:
    """The same from the checksum of each tensor."""
    total = 0
    for name in sorted(checksums):
        total = (total * 1_000_003 + stable_hash(name) + checksums[name]) % 2**64
    return f"{total:016x}"


def _weights(count: int, device: torch.device) -> Tensor:
    """An odd number for each place."""
    return torch.arange(count, device=device) * 0x1E3779B97F4A7C15 | 1


def _weighted_sum(tensor: Tensor, weights: Tensor) -> Tensor:
    tensor = tensor.detach().contiguous()
    return (tensor.view(_BITS[tensor.element_size()]).flatten() * weights).sum()  # int64: weights are


def _header(tensor: Tensor) -> int:
    return stable_hash(str(tuple(tensor.shape)), str(tensor.dtype))
