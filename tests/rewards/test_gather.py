"""The rewards of a step and the weights of its samples. Gathering from several ranks is tested in
tests/test_trainer.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from omnirl_hpc.config.schema import RewardConfig, RewardPartConfig
from omnirl_hpc.errors import RewardError
from omnirl_hpc.rewards.gather import ScoredStep, gather_scores
from omnirl_hpc.rewards.runner import Scores
from omnirl_hpc.sampling.samples import GROUP_PLACE
from tests.helpers import one_rank_group, run_ranks

NAN = math.nan


def step(groups: list[int], mask: list[bool]) -> ScoredStep:
    order = torch.arange(len(groups))
    places = torch.tensor(groups) * GROUP_PLACE + order
    return ScoredStep(torch.zeros(len(groups)).double(), {}, torch.tensor(mask), places, order, 0.0)


def test_weights_of_each_update_sum_to_one():
    scored = step([0, 0, 1, 1, 2, 2, 3, 3], [True, False, True, True, True, True, True, True])
    weights = scored.weights(2, scored.mask)
    third, quarter = 1 / 3, 1 / 4  # the first update has 3 valid samples, the second 4
    torch.testing.assert_close(
        weights, torch.tensor([third, 0, third, third, quarter, quarter, quarter, quarter])
    )


def test_an_update_without_any_valid_sample_weighs_nothing():
    scored = step([0, 0, 1, 1], [False, False, True, True])
    assert scored.weights(2, scored.mask).tolist() == [0, 0, 0.5, 0.5]


def test_groups_are_replaced_in_their_places():
    """Groups 0 and 2 of four, where this rank has groups 0 and 1 and makes another group 0."""
    old, new = step([0, 0, 1, 1, 2, 2, 3, 3], [True] * 8), step([0, 0, 2, 2], [True, False, True, True])
    old = replace(old, rewards=torch.arange(8).double(), own=torch.arange(4))
    new = replace(new, rewards=10 + torch.arange(4).double(), own=torch.arange(2))
    made = old.with_groups(new)
    assert made.rewards.tolist() == [10, 11, 2, 3, 12, 13, 6, 7]
    assert made.mask.tolist() == [True, False, *[True] * 6]
    assert made.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and made.own.tolist() == [0, 1, 2, 3]


def uneven(rank: int) -> list[float]:
    places = torch.tensor([[], [0, GROUP_PLACE, 1]][rank], dtype=torch.int64)
    scores = {"text": Scores([[], [1.0, 3.0, 2.0]][rank], 0.0, [])}
    made = gather_scores(scores, places, RewardConfig({"text": RewardPartConfig()}))
    return [made.rewards.tolist(), made.own.tolist()]


def uneven_of_rank() -> list:
    return uneven(dist.get_rank())


def test_a_rank_may_have_nothing_to_score():
    assert run_ranks(2, uneven_of_rank) == [[[1, 2, 3], []], [[1, 2, 3], [0, 2, 1]]]


def gathered(allowed: float = 1.0, **scores: list[float]) -> ScoredStep:
    """Two groups of two samples, in another order than theirs; text counts twice, size is subtracted."""
    places = torch.tensor([1, 0, 1, 0]) * GROUP_PLACE + torch.tensor([0, 1, 1, 0])
    parts = {"text": RewardPartConfig(weight=2.0), "size": RewardPartConfig(weight=-1.0)}
    parts = (
        {name: Scores(values, 1.5, ["no paper"] if NAN in values else []) for name, values in scores.items()},
        parts,
    )
    with one_rank_group():
        return gather_scores(parts[0], places, RewardConfig(parts[1], max_failed_fraction=allowed))


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
    places = torch.tensor([1, 0, 1, 0]) * GROUP_PLACE + torch.tensor([0, 1, 1, 0])
    scores = Scores([0.1, 0.2, 0.3, 0.4], 0.0, [], {"red": [1.0, 2.0, NAN, 4.0]})
    with one_rank_group():
        made = gather_scores({"text": scores}, places, RewardConfig({"text": RewardPartConfig(weight=2.0)}))
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
