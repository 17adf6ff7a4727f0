"""The rewards of a step and the weights of its samples. Gathering from several ranks is tested in
tests/test_trainer.py.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from omnirl_hpc.config.schema import RewardConfig, RewardPartConfig
from omnirl_hpc.errors import RewardError
from omnirl_hpc.rewards.gather import ScoredStep, gather_scores
from omnirl_hpc.rewards.runner import Scores
from tests.helpers import one_rank_group

NAN = math.nan


def step(groups: list[int], mask: list[bool]) -> ScoredStep:
    size = len(groups)
    return ScoredStep(
        torch.zeros(size).double(), {}, torch.tensor(mask), torch.tensor(groups), torch.arange(size), 0.0
    )


def test_weights_of_each_update_sum_to_one():
    weights = step([0, 0, 1, 1, 2, 2, 3, 3], [True, False, True, True, True, True, True, True]).weights(
        updates=2
    )
    third, quarter = 1 / 3, 1 / 4  # the first update has 3 valid samples, the second 4
    torch.testing.assert_close(
        weights, torch.tensor([third, 0, third, third, quarter, quarter, quarter, quarter])
    )


def test_an_update_without_any_valid_sample_weighs_nothing():
    assert step([0, 0, 1, 1], [False, False, True, True]).weights(updates=2).tolist() == [0, 0, 0.5, 0.5]


def gathered(allowed: float = 1.0, **scores: list[float]) -> ScoredStep:
    """Two groups of two samples, in another order than theirs; text counts twice, size is subtracted."""
    batch = SimpleNamespace(group=torch.tensor([1, 0, 1, 0]), sample=torch.tensor([0, 1, 1, 0]))
    parts = {"text": RewardPartConfig(weight=2.0), "size": RewardPartConfig(weight=-1.0)}
    parts = (
        {name: Scores(values, 1.5, ["no paper"] if NAN in values else []) for name, values in scores.items()},
        parts,
    )
    with one_rank_group():
        return gather_scores(parts[0], batch, RewardConfig(parts[1], max_failed_fraction=allowed))


def test_rewards_are_the_weighted_sum_of_the_parts_in_the_order_of_groups():
    made = gathered(text=[0.1, 0.2, 0.3, 0.4], size=[1.0, 2.0, 3.0, 4.0])
    assert made.parts["text"].tolist() == [0.4, 0.2, 0.1, 0.3] and made.parts["size"].tolist() == [4, 2, 1, 3]
    assert made.rewards.tolist() == pytest.approx([0.8 - 4, 0.4 - 2, 0.2 - 1, 0.6 - 3])
    assert made.groups.tolist() == [0, 0, 1, 1] and made.own.tolist() == [2, 1, 3, 0]
    assert made.seconds == 3.0


def test_a_sample_that_one_part_could_not_score_has_no_reward_but_keeps_its_other_score():
    made = gathered(text=[0.1, NAN, 0.3, 0.4], size=[1.0, 2.0, 3.0, 4.0])
    assert made.mask.tolist() == [True, False, True, True] and math.isnan(made.rewards[1])
    assert made.parts["size"][1] == 2.0


def test_components_are_gathered_beside_the_parts_and_count_nothing():
    batch = SimpleNamespace(group=torch.tensor([1, 0, 1, 0]), sample=torch.tensor([0, 1, 1, 0]))
    scores = Scores([0.1, 0.2, 0.3, 0.4], 0.0, [], {"red": [1.0, 2.0, NAN, 4.0]})
    with one_rank_group():
        made = gather_scores({"text": scores}, batch, RewardConfig({"text": RewardPartConfig(weight=2.0)}))
    assert made.rewards.tolist() == pytest.approx([0.8, 0.4, 0.2, 0.6]) and made.mask.all()
    assert list(made.components) == ["text/red"] and list(made.parts) == ["text"]
    assert made.components["text/red"].tolist() == pytest.approx([4, 2, 1, NAN], nan_ok=True)


def test_too_many_failures_name_every_part_that_failed():
    with pytest.raises(RewardError) as error:
        gathered(allowed=0.5, text=[0.1, NAN, 0.3, 0.4], size=[NAN, 2.0, NAN, 4.0])
    assert str(error.value) == (
        "reward text gave no finite score for 1 and reward size gave no finite score for 2 of 4 samples, "
        "more than reward.max_failed_fraction=0.5 allows; first failure on this rank: no paper"
    )
    made = gathered(allowed=0.75, text=[0.1, NAN, 0.3, 0.4], size=[NAN, 2.0, NAN, 4.0])
    assert made.mask.tolist() == [True, False, False, False]
