"""Rewards -> advantages, normalised within the group of samples of one prompt."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

STANDARD_DEVIATIONS = ("batch", "group", None)
EPSILON = 1e-4  # added to the standard deviation, as in flow_grpo and its descendants


def advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    std: str | None = "batch",
    mask: Tensor | None = None,
    leave_one_out: bool = False,
) -> Tensor:
    """Advantages [B] fp32: reward minus the mean of its group, divided by a standard deviation plus 1e-4.

    rewards: [B] floats; group_ids: [B] integers; mask: [B] bool, False for samples without a valid reward:
    they take no part in means and deviations, and their advantage is 0. std: "batch" divides by the unbiased
    deviation of all valid rewards, "group" by that of the group, None by nothing. leave_one_out: the mean is
    that of the others of the group (RLOO, arXiv 2402.14740), which makes the difference n / (n - 1) times as
    large in a group of n.

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
        if leave_one_out:
            centred *= len(inside) / (len(inside) - 1)
        result[members] = centred / (inside.std() + EPSILON) if std == "group" else centred
    if std == "batch" and int(valid.sum()) > 1:
        result /= values[valid].std() + EPSILON
    return result.float()


def normalized_mix(
    parts: Mapping[str, Tensor], weights: Mapping[str, float], group_ids: Tensor, mask: Tensor
) -> Tensor:
    """[N] fp64 rewards of several parts that are normalised in each group before they are added up (GDPO,
    arXiv 2601.05242): the sum of weight x (score - mean of the group) / (standard deviation of the group +
    1e-4). GDPO's last step, dividing by the deviation of the batch, is `advantages` with std="batch".

    parts: name -> [N] scores; NaN where mask [N] is False, and there the result is NaN, too.
    """
    mixed = sum(
        weights[name] * advantages(part, group_ids, std="group", mask=mask).double()
        for name, part in parts.items()
    )
    return torch.where(mask, mixed, torch.nan)


def zero_std_groups(rewards: Tensor, group_ids: Tensor, mask: Tensor) -> int:
    """The number of groups that teach nothing, because all valid rewards in them are equal or none is
    valid.
    """
    count = 0
    for group in torch.unique(group_ids):
        inside = rewards[(group_ids == group) & mask]
        count += int(inside.numel() == 0 or bool(inside.min() == inside.max()))
    return count
