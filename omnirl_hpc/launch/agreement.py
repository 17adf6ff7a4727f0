"""Ranks agree on what failed, so that none waits for one that cannot go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from omnirl_hpc.errors import OmniRLError

Result = TypeVar("Result")


def together(action: Callable[[], Result], kind: type[OmniRLError]) -> Result:
    """What `action` returns on this rank. Where it raises `kind` on one, all raise that, naming the lowest
    such rank. Collective.
    """
    result = error = None
    try:
        result = action()
    except kind as failure:
        error = f"rank {dist.get_rank()}: {failure}"
    if failed := [error for error in gather(error) if error]:
        raise kind(failed[0])
    return result


def by_rank_0(action: Callable[[], Result], kind: type[OmniRLError]) -> Result:
    """What `action` returns on rank 0, which alone does it; `kind`, where that raises it. Collective."""
    return gather(together(lambda: action() if dist.get_rank() == 0 else None, kind))[0]


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, on every rank. Collective."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
