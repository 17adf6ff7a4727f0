"""Ranks agree on what failed, so that none waits for one that cannot go on."""

from __future__ import annotations

import torch.distributed as dist


def first_error(error: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """The error of the lowest rank that has one, on every rank; None where nobody has. Collective."""
    errors: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, error, group=group)
    return next((error for error in errors if error), None)
