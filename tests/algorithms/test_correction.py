"""Weights and rejection of samples that engine and actor see differently, by hand, and in an update."""

from __future__ import annotations

import math

import pytest
import torch

from omnirl_hpc.actor.update import LARGEST_GAP, correct_rollout, look_back
from omnirl_hpc.algorithms.correction import CorrectionConfig, correct
from omnirl_hpc.algorithms.trajectory import TrajectoryConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.metrics.accumulator import Accumulator
from omnirl_hpc.policies import CURRENT
from tests.algorithms.cases import COUNT, SCHEDULES, make, units, velocity
from tests.helpers import CPU, go_on, one_rank_group

# Ratios of three samples at two steps.
RATIOS = torch.tensor([[1.0, 1.0], [3.0, 0.5], [0.25, 1.2]])
THETA = torch.tensor([0.5, -0.3, 0.7])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (None, [[1, 1], [1, 1], [1, 1]]),
        ("step", [[1, 1], [2, 0.5], [0.25, 1.2]]),  # 3 is cut off at 2
        ("sequence", [[1, 1], [1.5, 1.5], [0.3, 0.3]]),  # products
    ],
)
def test_importance(level, expected):
    made = correct(RATIOS.log(), CorrectionConfig(importance=level))
    assert made.importance.flatten().tolist() == pytest.approx([w for row in expected for w in row])
    assert made.kept.all()


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (None, [[True, True], [True, True], [True, True]]),
        ("step", [[True, True], [False, True], [False, True]]),
        ("sequence", [[True, True], [True, True], [False, False]]),  # sqrt(1.5) and sqrt(.3)
    ],
)
def test_rejection(level, expected):
    settings = CorrectionConfig(rejection=level, rejection_low=0.55 if level == "sequence" else 0.5 - 1e-6)
    made = correct(RATIOS.log(), settings)
    assert made.kept.tolist() == expected and (made.importance == 1).all()


def test_what_is_not_a_number_is_rejected():
    made = correct(torch.tensor([[0.0, math.nan]]), CorrectionConfig(rejection="step"))
    assert made.kept.tolist() == [[True, False]]


class Actor:
    def velocity(self, point, policy):
        return velocity(point, THETA)


@pytest.mark.parametrize("in_denominator", [False, True])
def test_an_update_without_what_is_rejected(in_denominator):
    """The engine's log-probabilities are the actor's, but for sample 0 at its second step and sample 3 at
    all. What is left counts as much as all did, or keeps its weight. Micro-batches are of two samples.
    """
    settings = {"rejection": "step", "rejected_in_denominator": in_denominator, "importance": "step"}
    algorithm = make("flow_grpo", correction=CorrectionConfig(**settings))
    batch = units(algorithm)
    recorded = batch.units.trajectory.log_probs
    for i, point in enumerate(algorithm.training_points(batch, SCHEDULES)):
        recorded[:, i] = algorithm.log_prob(point, velocity(point, THETA)) - math.log(1.5)
    recorded[0, 1] -= 1
    recorded[3] += 2
    parts = [batch[i : i + 2] for i in range(0, COUNT, 2)]
    points = [point for part in parts for point in algorithm.training_points(part, SCHEDULES)]
    with one_rank_group():
        metrics = Accumulator(CPU)
        (old,) = look_back(Actor(), algorithm, [points], metrics, go_on)
        reported = metrics.reduce()
    seen = [algorithm.with_old(point, o) for point, o in zip(points, old)]
    weights = torch.cat([torch.stack([p.weights for p in seen[i : i + 3]]) for i in (0, 3, 6)], dim=1)
    expected = (batch.weights / 3).repeat(3, 1)
    expected[1, 0] = expected[:, 3] = 0
    if not in_denominator:  # 4 of 15 points of weight 1/15 are left out
        expected *= 15 / 11
    torch.testing.assert_close(weights, expected)
    assert reported["correction/rejected"] == pytest.approx(4 / 15) and LARGEST_GAP in reported
    # of 1.5 each, but for sample 0 at its second step, cut off at 2, and sample 3, 1.5 / e^2
    importance = (11 * 1.5 + 2 + 3 * 1.5 / math.e**2) / 15
    assert reported["correction/importance"] == pytest.approx(importance, rel=1e-4)
    for point in seen:  # the factor is of the policy loss
        alone = algorithm.loss(point, {CURRENT: velocity(point, THETA)}).loss
        expected_loss = float((-point.advantages * point.importance * point.weights).sum())
        assert float(alone) == pytest.approx(expected_loss, rel=1e-5, abs=1e-7)


def test_where_nothing_is_rejected_weights_stay_what_they_are():
    algorithm = make(
        "flow_grpo", correction=CorrectionConfig(rejection="sequence", rejection_high=1e9, rejection_low=0.0)
    )
    points = list(algorithm.training_points(units(algorithm), SCHEDULES))
    with one_rank_group():
        old = [algorithm.observe(point, velocity(point, THETA)) for point in points]
        made = correct_rollout(algorithm, points, old, Accumulator(CPU))
    assert all(torch.equal(o.weights, point.weights) for o, point in zip(made, points))


def test_only_a_correction_looks_at_the_first_update():
    plain, corrected = make("flow_grpo"), make("flow_grpo", correction=CorrectionConfig(rejection="step"))
    trusting = make("flow_grpo", old_log_prob="rollout", correction=CorrectionConfig(rejection="step"))
    assert plain.recomputes_old and not plain.corrects and corrected.corrects
    assert trusting.corrects and trusting.recomputes_old  # rejects by the actor, and trusts the engine
    (point, *_) = trusting.training_points(units(trusting), SCHEDULES)
    seen = trusting.with_old(point, trusting.observe(point, velocity(point, THETA)))
    assert torch.equal(seen.old_log_prob, point.rollout_log_prob)
    with one_rank_group():
        old = look_back(Actor(), plain, [[point], [point]], Accumulator(CPU), go_on)
    assert old[0] is None and len(old[1]) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"importance": "token"}, "algorithm.correction.importance=token .* step, sequence, null"),
        ({"rejection": "all"}, "algorithm.correction.rejection=all .* step, sequence, null"),
        ({"importance_limit": 0.0}, "algorithm.correction.importance_limit=0.0 must be greater than 0"),
        ({"rejection_low": 1.5}, "algorithm.correction.rejection_low=1.5, .* must hold 1 between them"),
    ],
)
def test_settings_check_themselves(settings, said):
    with pytest.raises(ConfigError, match=said):
        CorrectionConfig(**settings)


def test_weights_need_two_policies():
    with pytest.raises(ConfigError, match="correction.importance=step .* set it to recompute"):
        TrajectoryConfig(name="", old_log_prob="rollout", correction=CorrectionConfig(importance="step"))
