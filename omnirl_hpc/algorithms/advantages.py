"""Rewards -> advantages, normalised within the group of samples of one prompt."""

from __future__ import annotations

import torch
from torch import Tensor

STANDARD_DEVIATIONS = ("batch", "group", None)
EPSILON = 1e-4  # added to the standard deviation, as in flow_grpo and its descendants


def advantages(
    rewards: Tensor, group_ids: Tensor, *, std: str | None = "batch", mask: Tensor | None = None
) -> Tensor:
    """Advantages [B] fp32: reward minus the mean of its group, divided by a standard deviation plus 1e-4.

    rewards: [B] floats; group_ids: [B] integers; mask: [B] bool, False for samples without a valid reward:
    they take no part in means and deviations, and their advantage is 0. std: "batch" divides by the unbiased
    deviation of all valid rewards, "group" by that of the group, None by nothing.

    A group whose valid rewards are all equal, a group of one included, gives exactly 0.
    Raises ValueError for a reward that is not finite and not masked, and for an unknown `std`.
    """
    if std not in STANDARD_DEVIATIONS:
        raise ValueError(f"std={std!r} must be 'batch', 'group' or None")
    valid = torch.ones_like(group_ids, dtype=torch.bool) if mask is None else mask
    if not bool(torch.isfinite(rewards[valid]).all()):
        raise ValueError("a reward is not finite and not masked")
    result = torch.zeros(rewards.shape, dtype=torch.float64, device=rewards.device)
    values = rewards.double()
    for group in torch.unique(group_ids[valid]):
        members = (group_ids == group) & valid
        inside = values[members]
        if inside.min() == inside.max():
            continue  # exactly 0, which subtracting a rounded mean would not give
        centred = inside - inside.mean()
        result[members] = centred / (inside.std() + EPSILON) if std == "group" else centred
    if std == "batch" and int(valid.sum()) > 1:
        result /= values[valid].std() + EPSILON
    return result.float()


def zero_std_groups(rewards: Tensor, group_ids: Tensor, mask: Tensor) -> list[int]:
    """The groups that teach nothing, because all valid rewards in them are equal or none is valid."""
    found = []
    for group in torch.unique(group_ids).tolist():
        inside = rewards[(group_ids == group) & mask]
        if inside.numel() == 0 or bool(inside.min() == inside.max()):
            found.append(group)
    return found
