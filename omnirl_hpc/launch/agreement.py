"""Ranks agree on what failed, so that none waits for one that cannot go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from omnirl_hpc.errors import LockLostError, OmniRLError

Result = TypeVar("Result")


def raise_on_all_ranks(
    action: Callable[[], Result], kind: type[OmniRLError], group: dist.ProcessGroup | None = None
) -> Result:
    """What `action` returns on this rank. Where it raises `kind` on one, or LockLostError, as every write
    may, all raise that, naming the lowest such rank. Collective.
    """
    result: Any = None
    error = None
    try:
        result = action()
    except (kind, LockLostError) as failure:
        error = type(failure), f"rank {dist.get_rank()}: {failure}"
    if failed := [error for error in gather(error, group) if error]:
        error_type, text = failed[0]
        raise error_type(text)
    return result


def by_rank_0(action: Callable[[], Result], kind: type[OmniRLError]) -> Result:
    """What `action` returns on rank 0, which alone does it; `kind`, where that raises it. Collective."""
    return gather(raise_on_all_ranks(lambda: action() if dist.get_rank() == 0 else None, kind))[0]


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, on every rank. Collective."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
