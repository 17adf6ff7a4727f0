"""The loops over training points, on a policy that is one number: expected values by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from omnirl_hpc.actor.update import (
    LARGEST_GAP,
    MEAN_GAP,
    accumulate_gradients,
    apply_gradients,
    check_gap,
    recompute_old,
)
from omnirl_hpc.algorithms.algorithm import (
    Algorithm,
    LikelihoodAlgorithm,
    LikelihoodPoint,
    LossOutput,
    weighted_sum,
)
from omnirl_hpc.errors import MismatchError
from omnirl_hpc.metrics.accumulator import Accumulator
from omnirl_hpc.policies import CURRENT, REFERENCE
from omnirl_hpc.sampling.streams import LATENTS, map_streams
from tests.helpers import CPU, go_on, one_rank_group


class OneNumber:
    """An actor that predicts latents x theta, or 0 as the reference."""

    def __init__(self, theta: float) -> None:
        self.theta = torch.tensor(theta, requires_grad=True)
        self.calls, self.gradients = [], []

    def velocity(self, point, policy):
        self.calls.append((policy, torch.is_grad_enabled()))
        return map_streams(lambda x: x * (self.theta if policy == CURRENT else 0.0), point.latents)

    def apply_gradients(self):
        self.gradients.append(float(self.theta.grad))
        self.theta.grad = None
        return abs(self.gradients[-1]), 0.5


@dataclass(frozen=True, kw_only=True)
class Point(LikelihoodPoint):
    advantages: torch.Tensor


class SumOfVelocity(LikelihoodAlgorithm):
    """log p = the velocity's sum; loss = - sum of weights x advantages x (log p - log p of the reference)."""

    recomputes_old = True
    points_per_unit = 1

    def __init__(self, *policies: str) -> None:
        self.policies = policies
        self.seen = []  # the old log-probabilities of the points that the loss saw

    def training_points(self, batch, schedules):
        raise NotImplementedError

    def log_prob(self, point, velocity):
        return velocity[LATENTS].flatten(1).sum(dim=1)

    def loss(self, point, velocities):
        self.seen.append(point.old_log_prob)
        value = self.log_prob(point, velocities[CURRENT])
        if REFERENCE in velocities:
            value = value - self.log_prob(point, velocities[REFERENCE])
        return LossOutput(
            -weighted_sum(point.advantages * value, point.weights),
            {"value": value.detach()},
            {"largest": value.detach().max()},
        )


class WithoutLikelihoods(Algorithm):
    """The same loss of an algorithm that has none."""

    points_per_unit = 1
    training_points = SumOfVelocity.training_points
    log_prob, loss = SumOfVelocity.log_prob, SumOfVelocity.loss

    def __init__(self) -> None:
        self.policies, self.seen = (CURRENT,), []


def point(
    latents: list[float], advantages: list[float], weights: list[float], recorded: list[float]
) -> Point:
    return Point(
        latents={LATENTS: torch.tensor(latents).reshape(-1, 1, 1)},
        timesteps={LATENTS: torch.zeros(len(latents))},
        conditions={},
        negative=None,
        weights=torch.tensor(weights),
        rollout_log_prob=torch.tensor(recorded),
        old_log_prob=torch.tensor(recorded),
        advantages=torch.tensor(advantages),
    )


def update(actor, algorithm, points, metrics, first):
    accumulate_gradients(actor, algorithm, points, metrics, go_on, first=first)
    apply_gradients(actor, metrics)


@pytest.fixture
def points():
    return [
        point([1.0, 2.0], [1.0, -1.0], [0.25, 0.25], recorded=[3.0, 6.0]),
        point([4.0, 5.0], [2.0, 1.0], [0.5, 0.0], recorded=[12.5, 15.0]),
    ]


@pytest.fixture
def metrics():
    with one_rank_group():
        yield Accumulator(CPU)


def test_one_step_on_the_sum_of_all_points(points, metrics):
    actor = OneNumber(3.0)
    update(actor, SumOfVelocity(CURRENT), points, metrics, first=False)
    # d/dtheta of -(.25 * 1 * 1 - .25 * 1 * 2 + .5 * 2 * 4): 5.0 has no weight
    assert actor.gradients == [-(0.25 - 0.5 + 4.0)]
    reported = metrics.reduce()
    assert reported.pop("loss") == pytest.approx(3.0 * -3.75)
    assert reported.pop("value") == pytest.approx(
        3.0 * (0.25 * 1 + 0.25 * 2 + 0.5 * 4)
    )  # the weights sum to 1
    assert reported == {"grad_norm": 3.75, "lr": 0.5, "largest": 15.0}  # no gap was measured


def test_only_the_policy_has_gradients(points, metrics):
    actor = OneNumber(3.0)
    update(actor, SumOfVelocity(CURRENT, REFERENCE), points, metrics, first=False)
    assert actor.calls == [(CURRENT, True), (REFERENCE, False)] * 2
    assert actor.gradients == [-3.75]


def test_first_update_measures_the_gap_to_the_rollout(points, metrics):
    """By the forward pass of the update itself, and the loss sees what the actor computed."""
    algorithm = SumOfVelocity(CURRENT)
    update(OneNumber(3.0), algorithm, points, metrics, first=True)
    assert [old.tolist() for old in algorithm.seen] == [[3.0, 6.0], [12.0, 15.0]]
    assert not any(old.requires_grad for old in algorithm.seen)
    reported = metrics.reduce()
    assert reported[LARGEST_GAP] == 0.5  # 3 x 4 against 12.5; the others are exact
    assert reported[MEAN_GAP] == 0.5 / 4


def test_an_algorithm_that_trusts_the_engine_sees_its_log_probs(points, metrics):
    algorithm = SumOfVelocity(CURRENT)
    algorithm.recomputes_old = False
    update(OneNumber(3.0), algorithm, points, metrics, first=True)
    assert [old.tolist() for old in algorithm.seen] == [[3.0, 6.0], [12.5, 15.0]]
    assert metrics.reduce()[LARGEST_GAP] == 0.5


def test_later_updates_see_what_the_actor_computed_before_the_first(points, metrics):
    """And the points that they were computed of are as they were: they are made again."""
    actor, algorithm = OneNumber(3.0), SumOfVelocity(CURRENT)
    old = recompute_old(actor, algorithm, points, metrics, go_on)
    assert [o.log_prob.tolist() for o in old] == [[3.0, 6.0], [12.0, 15.0]]
    assert not any(o.log_prob.requires_grad for o in old)
    assert actor.calls == [(CURRENT, False)] * 2
    assert metrics.reduce() == {LARGEST_GAP: 0.5, MEAN_GAP: 0.5 / 4}
    assert [p.old_log_prob.tolist() for p in points] == [[3.0, 6.0], [12.5, 15.0]]
    accumulate_gradients(OneNumber(4.0), algorithm, points, metrics, go_on, old)
    assert [log_prob.tolist() for log_prob in algorithm.seen] == [[3.0, 6.0], [12.0, 15.0]]


@pytest.mark.parametrize("limit", [0.4, 0.5])
def test_the_gate_between_engine_and_actor(points, metrics, limit):
    algorithm = SumOfVelocity(CURRENT)
    update(OneNumber(3.0), algorithm, points, metrics, first=True)  # a gap of 0.5, see above
    if limit < 0.5:
        with pytest.raises(MismatchError, match=r"by up to 0.5, more than rollout.max_log_prob_gap=0.4"):
            check_gap(algorithm, metrics, limit)
    else:
        check_gap(algorithm, metrics, limit)


def test_without_likelihoods_there_is_no_gap_to_measure(points, metrics):
    algorithm = WithoutLikelihoods()
    update(OneNumber(3.0), algorithm, points, metrics, first=True)
    check_gap(algorithm, metrics, 0.0)
    assert not {LARGEST_GAP, MEAN_GAP} & metrics.reduce().keys()


def test_a_gap_that_is_not_a_number_does_not_pass_the_gate(metrics):
    metrics.add_max(LARGEST_GAP, math.nan)
    with pytest.raises(MismatchError, match="by up to nan"):
        check_gap(SumOfVelocity(CURRENT), metrics, 1.0)


@pytest.mark.parametrize(("tolerated", "warnings"), [(0.4, 1), (0.5, 0)])
def test_trusting_the_engine_beyond_the_clip_range_warns(points, metrics, caplog, tolerated, warnings):
    algorithm = SumOfVelocity(CURRENT)
    algorithm.tolerated_gap = tolerated
    update(OneNumber(3.0), algorithm, points, metrics, first=True)
    check_gap(algorithm, metrics, limit=1.0)
    assert len([r for r in caplog.records if "more than the clip range" in r.getMessage()]) == warnings


def test_a_stop_is_asked_for_before_every_point(points, metrics):
    """And leaves through the loop: what it raises is not caught."""
    asked = []

    def stop_at_the_second():
        asked.append(None)
        if len(asked) == 2:
            raise InterruptedError

    actor = OneNumber(3.0)
    with pytest.raises(InterruptedError):
        accumulate_gradients(actor, SumOfVelocity(CURRENT), points, metrics, stop_at_the_second, first=True)
    assert len(actor.calls) == 1
    asked.clear()
    with pytest.raises(InterruptedError):
        recompute_old(actor, SumOfVelocity(CURRENT), points, metrics, stop_at_the_second)
    assert len(actor.calls) == 2
