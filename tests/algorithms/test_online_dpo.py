"""Which two samples of a group make a pair, and what it weighs. The loss is DPO's."""

from __future__ import annotations

import math

import pytest
import torch

from omnirl_hpc.algorithms.algorithm import PAIRS, ROLLOUT
from omnirl_hpc.algorithms.online_dpo import OnlineDPO, OnlineDPOConfig
from omnirl_hpc.algorithms.units import Pairs
from omnirl_hpc.config.schema import Config
from omnirl_hpc.policies import CURRENT, REFERENCE
from omnirl_hpc.sampling.samples import SampleIdentity, Samples
from omnirl_hpc.sampling.streams import LATENTS

# three groups of three: with an order, with a sample that has no reward, all equal
REWARDS = torch.tensor([0.2, 0.9, 0.1, math.nan, 0.5, 0.7, 0.3, 0.3, 0.3])
GROUPS, MASK = torch.arange(9) // 3, torch.isfinite(REWARDS)


def make() -> OnlineDPO:
    return OnlineDPO(Config(algorithm=OnlineDPOConfig()))


def samples() -> Samples:
    return Samples(
        identity=[SampleIdentity(0, 4, f"p{row // 3}", row % 3) for row in range(9)],
        group=GROUPS,
        conditions=[{"embeds": torch.full((1,), float(row // 3))} for row in range(9)],
        negative=None,
        clean={LATENTS: torch.arange(9.0)[:, None]},
        version=torch.zeros(9, dtype=torch.int64),
        noise_hash=torch.zeros(9, dtype=torch.int64),
    )


def test_the_best_and_the_worst_of_each_group():
    advantages = make().advantages(REWARDS, GROUPS, MASK)
    assert advantages.tolist() == [0, 1, -1, 0, -1, 1, 0, 0, 0]
    assert make().counted(advantages, MASK).tolist() == [a != 0 for a in advantages.tolist()]


def test_of_equal_rewards_the_first_counts():
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    groups, mask = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool)
    assert make().advantages(rewards, groups, mask).tolist() == [1, -1, 0, 0]


def test_pairs_hold_the_groups_condition_and_weigh_as_their_samples():
    algorithm, advantages = make(), make().advantages(REWARDS, GROUPS, MASK)
    weights = algorithm.counted(advantages, MASK).float() / 4  # two pairs that count
    batch = algorithm.units(samples(), advantages, weights)
    assert isinstance(batch.units, Pairs) and len(batch) == 3
    assert batch.weights.tolist() == [0.5, 0.5, 0.0] and batch.advantages.tolist() == [1, 1, 1]
    assert batch.units.chosen[LATENTS].flatten().tolist()[:2] == [1, 5]
    assert batch.units.rejected[LATENTS].flatten().tolist()[:2] == [2, 4]
    assert batch.units.group.tolist() == [0, 1, 2]
    assert [who.prompt_id for who in batch.units.identity] == ["p0", "p1", "p2"]
    assert [float(condition["embeds"]) for condition in batch.units.conditions] == [0, 1, 2]


def test_groups_of_equal_rewards_have_exactly_no_gradient():
    algorithm, equal = make(), torch.full((9,), 0.1)
    advantages = algorithm.advantages(equal, GROUPS, torch.ones(9, dtype=torch.bool))
    batch = algorithm.units(samples(), advantages, torch.zeros(9))
    (point,) = algorithm.training_points(batch, {})
    velocity = torch.randn(6, 1, generator=torch.Generator().manual_seed(0)).requires_grad_()
    reference = {LATENTS: velocity.detach() + 1}
    output = algorithm.loss(point, {CURRENT: {LATENTS: velocity}, REFERENCE: reference})
    output.loss.backward()
    assert float(output.loss) == 0 and bool((velocity.grad == 0).all())


def test_pairs_do_not_depend_on_which_rank_has_which_groups():
    """As two ranks have them, in another order."""
    algorithm, whole = make(), samples()
    advantages = algorithm.advantages(REWARDS, GROUPS, MASK)
    weights = algorithm.counted(advantages, MASK).float() / 4
    together = algorithm.units(whole, advantages, weights)
    for group in range(3):
        rows = (GROUPS == group).nonzero().squeeze(1)
        (part,) = (algorithm.units(whole[rows], advantages[rows], weights[rows]),)
        assert torch.equal(part.units.chosen[LATENTS], together.units.chosen[LATENTS][group : group + 1])
        assert part.units.identity == together.units.identity[group : group + 1]
        assert torch.equal(part.weights, together.weights[group : group + 1])


def test_what_it_needs():
    algorithm = make()
    assert (algorithm.source, algorithm.needs) == (ROLLOUT, PAIRS) and algorithm.whole_groups
    assert algorithm.policies == (CURRENT, REFERENCE) and algorithm.sampler == CURRENT
    assert algorithm.units_per_prompt == 1 and algorithm.points_per_unit == 1
    assert algorithm.window(0) is None and algorithm.settings.beta == pytest.approx(100)
