"""Advantages against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnirl_hpc.algorithms.advantages import advantages, normalized_mix, zero_std_groups

REWARDS, GROUPS = torch.tensor([1.0, 3.0, 0.0, 2.0]), torch.tensor([0, 0, 1, 1])  # group means 2 and 1


def test_not_normalised():
    assert advantages(REWARDS, GROUPS, std=None).tolist() == [-1, 1, -1, 1]


def test_divided_by_the_batch():
    # all rewards: mean 1.5, squares .25 + 2.25 + 2.25 + .25 = 5, unbiased deviation sqrt(5 / 3) = 1.290994
    expected = 1 / (1.290994 + 1e-4)
    assert advantages(REWARDS, GROUPS).tolist() == pytest.approx(
        [-expected, expected, -expected, expected], abs=1e-6
    )


def test_divided_by_the_group():
    # each group: squares 1 + 1, unbiased deviation sqrt(2) = 1.414214
    expected = 1 / (1.414214 + 1e-4)
    assert advantages(REWARDS, GROUPS, std="group").tolist() == pytest.approx(
        [-expected, expected, -expected, expected], abs=1e-6
    )


def test_groups_need_not_be_contiguous_nor_of_one_size():
    # group 7: 1, 2, 6 with mean 3; group 5: 4, 8 with mean 6
    rewards, groups = torch.tensor([1.0, 4.0, 2.0, 8.0, 6.0]), torch.tensor([7, 5, 7, 5, 7])
    assert advantages(rewards, groups, std=None).tolist() == [-2, -2, -1, 2, 3]


@pytest.mark.parametrize("std", ["batch", "group", None])
@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 1e8 + 0.1])
def test_a_group_of_equal_rewards_gives_exactly_zero(std, value):
    rewards = torch.tensor([value] * 7 + [1.0, 2.0], dtype=torch.float64)
    got = advantages(rewards, torch.tensor([0] * 7 + [1, 1]), std=std)
    assert got[:7].tolist() == [0.0] * 7
    assert got[8] > 0


@pytest.mark.parametrize("std", ["batch", "group", None])
def test_a_whole_batch_of_equal_rewards_gives_exactly_zero(std):
    assert advantages(torch.full((6,), 0.1), torch.tensor([0, 0, 0, 1, 1, 1]), std=std).tolist() == [0.0] * 6


@pytest.mark.parametrize("std", ["batch", "group", None])
def test_singletons_give_exactly_zero(std):
    got = advantages(torch.tensor([0.1, 1.0, 3.0]), torch.tensor([0, 1, 1]), std=std)
    assert got[0] == 0 and got[1] < 0 < got[2]
    assert advantages(torch.tensor([0.7]), torch.tensor([0]), std=std).tolist() == [0.0]


def test_masked_samples_take_no_part():
    rewards = torch.tensor([1.0, math.nan, 3.0, 0.0, 2.0, math.inf])
    groups, mask = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([True, False, True, True, True, False])
    assert advantages(rewards, groups, std=None, mask=mask).tolist() == [-1, 0, 1, -1, 1, 0]
    valid = advantages(REWARDS, GROUPS)  # the same rewards without the masked ones
    assert advantages(rewards, groups, mask=mask)[mask].tolist() == valid.tolist()


def test_a_mask_that_leaves_one_or_none_of_a_group():
    rewards, groups = torch.tensor([5.0, 1.0, 7.0, 8.0, 1.0, 3.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    mask = torch.tensor([True, False, False, False, True, True])
    assert advantages(rewards, groups, std=None, mask=mask).tolist() == [0, 0, 0, 0, -1, 1]
    assert advantages(rewards, groups, mask=torch.zeros(6, dtype=torch.bool)).tolist() == [0.0] * 6


def test_errors():
    with pytest.raises(ValueError, match="std='all' must be"):
        advantages(REWARDS, GROUPS, std="all")
    with pytest.raises(ValueError, match="not finite and not masked"):
        advantages(torch.tensor([1.0, math.nan]), torch.tensor([0, 0]))


@given(
    st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 3)), min_size=2, max_size=20),
    st.sampled_from(("batch", "group", None)),
)
def test_a_group_sums_to_zero_and_keeps_the_order_of_its_rewards(samples, std):
    rewards = torch.tensor([reward for reward, _ in samples], dtype=torch.float64)
    groups = torch.tensor([group for _, group in samples])
    got = advantages(rewards, groups, std=std)
    for group in groups.unique():
        inside, values = got[groups == group], rewards[groups == group]
        assert abs(float(inside.sum())) <= 1e-4 * (1 + float(inside.abs().sum()))
        assert bool((inside[values.argsort()].diff() >= 0).all())


def test_zero_std_groups_counts_groups_that_teach_nothing():
    rewards = torch.tensor([0.1, 0.1, 1.0, 2.0, math.nan, math.nan, 3.0, math.nan])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    assert zero_std_groups(rewards, groups, torch.isfinite(rewards)) == 3  # all but group 1


def test_leave_one_out_compares_with_the_others():
    # 1 against (2 + 6) / 2, 2 against (1 + 6) / 2, 6 against (1 + 2) / 2; 4 against 8
    rewards, groups = torch.tensor([1.0, 4.0, 2.0, 8.0, 6.0]), torch.tensor([7, 5, 7, 5, 7])
    assert advantages(rewards, groups, std=None, leave_one_out=True).tolist() == [-3, -4, -1.5, 4, 4.5]
    masked = torch.tensor([True, True, True, True, False])  # 6 has no valid reward: 1 against 2
    got = advantages(rewards, groups, std=None, mask=masked, leave_one_out=True)
    assert got.tolist() == [-1, -4, 1, 4, 0]


def test_parts_are_normalised_before_they_are_mixed():
    """Two groups of three; by hand: (score - mean) / (unbiased deviation + 1e-4), weighted and added."""
    parts = {
        "large": torch.tensor([100.0, 300.0, 200.0, 5.0, 5.0, 5.0], dtype=torch.float64),
        "small": torch.tensor([0.1, 0.1, 0.4, 0.0, 1.0, math.nan], dtype=torch.float64),
    }
    groups, mask = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([True] * 5 + [False])
    got = normalized_mix(parts, {"large": 1.0, "small": 2.0}, groups, mask)
    # group 0: 100, 300, 200 have deviation 100; .1, .1, .4 mean .2, squares .01 + .01 + .04, deviation
    # sqrt(.03). Group 1: equal scores say nothing; 0 and 1 have mean .5, deviation sqrt(.5).
    large, small, last = 100 / 100.0001, 0.1 / (math.sqrt(0.03) + 1e-4), 0.5 / (math.sqrt(0.5) + 1e-4)
    expected = [-large - 2 * small, large - 2 * small, 4 * small, -2 * last, 2 * last]
    assert got[:5].tolist() == pytest.approx(expected, abs=1e-6) and math.isnan(float(got[5]))


def test_equal_parts_of_a_group_say_exactly_nothing():
    parts = {"a": torch.full((4,), 0.1), "b": torch.tensor([1 / 3, 1 / 3, 0.0, 1.0])}
    got = normalized_mix(
        parts, {"a": 1.0, "b": 1.0}, torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
    )
    assert got[:2].tolist() == [0.0, 0.0] and got[2] < 0 < got[3]
