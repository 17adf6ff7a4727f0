"""Weights of a step's samples; the gathering itself needs ranks and is tested with them."""

from __future__ import annotations

import torch

from omnirl_hpc.rewards.gather import ScoredStep


def step(groups: list[int], mask: list[bool]) -> ScoredStep:
    size = len(groups)
    return ScoredStep(torch.zeros(size).double(), torch.tensor(mask), torch.tensor(groups), torch.arange(size), 0.0)


def test_weights_of_each_update_sum_to_one():
    weights = step([0, 0, 1, 1, 2, 2, 3, 3], [True, False, True, True, True, True, True, True]).weights(updates=2)
    third, quarter = 1 / 3, 1 / 4  # the first update has 3 valid samples, the second 4
    torch.testing.assert_close(weights, torch.tensor([third, 0, third, third, quarter, quarter, quarter, quarter]))


def test_an_update_without_any_valid_sample_weighs_nothing():
    assert step([0, 0, 1, 1], [False, False, True, True]).weights(updates=2).tolist() == [0, 0, 0.5, 0.5]
