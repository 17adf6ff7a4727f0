"""Ranks agree on what failed, so that none waits for one that cannot go on."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def first_error(error: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """The error of the lowest rank that has one, on every rank; None where nobody has. Collective."""
    return next((error for error in gather(error, group) if error), None)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, on every rank. Collective."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
