"""Denoising networks that take turns: each makes the steps at some levels of noise (Wan2.2 A14B)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor, nn

T = TypeVar("T", bound=Tensor)


def tensors_by_name(
    networks: Mapping[str, nn.Module], tensors_of: Callable[[nn.Module], Mapping[str, T]]
) -> dict[str, T]:
    """The tensors of all networks, given by the names of their folders: those of the first under their own
    names, those of another one below its name, as in transformer_2.blocks.0.to_q.weight.
    """
    first, *others = networks
    named = dict(tensors_of(networks[first]))
    for other in others:
        named |= {f"{other}.{name}": tensor for name, tensor in tensors_of(networks[other]).items()}
    return named


def parameters_of(network: nn.Module) -> dict[str, nn.Parameter]:
    return dict(network.named_parameters())
