"""What must hold for every algorithm on trajectories: its loss and gradient depend on the samples, and not on
how they are dealt out; groups of equal rewards teach nothing.
"""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.policies import REFERENCE
from tests.algorithms.cases import COUNT, SCHEDULES, loss_and_gradient, make, units, velocity

ON_TRAJECTORIES = ("flow_grpo", "grpo_guard", "flow_dppo", "tempflow_grpo", "dance_grpo", "mix_grpo")
THETA = torch.tensor([0.5, -0.3, 0.7])
KINDS = [("sde", 0.7), ("cps", 0.8), ("dance", 0.3)]


@pytest.mark.parametrize("name", ON_TRAJECTORIES)
@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_loss_and_gradient_do_not_depend_on_how_samples_are_dealt_out(name, kind, level):
    """Micro-batches of 1, 2 and 3; two ranks, whose gradients are added; another order. The old policy
    differs from the current one, so that some samples are out of range.
    """
    algorithm = make(name, kind, level, kl_coef=0.1)
    batch = units(algorithm)
    loss, gradient = loss_and_gradient(algorithm, [batch], THETA, 0.99 * THETA)
    assert bool((gradient != 0).any()) and bool(torch.isfinite(gradient).all())
    others = [[batch[i : i + size] for i in range(0, COUNT, size)] for size in (1, 2, 3)]
    others += [[batch[0::2], batch[1::2]], [batch[[5, 2, 0, 4, 1, 3]]]]
    for parts in others:
        again, theirs = loss_and_gradient(algorithm, parts, THETA, 0.99 * THETA)
        largest = float(gradient.abs().max())
        assert float((theirs - gradient).abs().max()) <= 1e-6 * max(1.0, largest)
        assert again == pytest.approx(loss, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", ON_TRAJECTORIES)
def test_groups_of_equal_rewards_teach_exactly_nothing(name):
    algorithm = make(name)
    batch = units(algorithm)
    rewards = torch.tensor([0.1, 0.1, 1 / 3, 1 / 3, 7.0, 7.0])
    batch.advantages = algorithm.advantages(rewards, batch.units.group, torch.ones(COUNT, dtype=torch.bool))
    _, gradient = loss_and_gradient(algorithm, [batch], THETA, 0.99 * THETA)
    assert gradient.tolist() == [0.0] * 3


@pytest.mark.parametrize("name", ON_TRAJECTORIES)
def test_a_reference_is_evaluated_only_where_it_counts(name):
    assert REFERENCE not in make(name).policies and REFERENCE in make(name, kl_coef=0.1).policies


@pytest.mark.parametrize("name", ON_TRAJECTORIES)
def test_the_gradient_prefers_what_is_better(name):
    """At the old policy every algorithm on trajectories has a gradient along A d log p."""
    algorithm = make(name)
    batch = units(algorithm)
    batch.weights = torch.full((COUNT,), 1 / COUNT)
    _, gradient = loss_and_gradient(algorithm, [batch], THETA)
    step = 1e-3 * gradient / gradient.norm()
    before, after = (likelihood(algorithm, batch, theta) for theta in (THETA, THETA - step))
    assert after > before


def likelihood(algorithm, batch, theta: torch.Tensor) -> float:
    """The sum of advantage x log-probability, weighted as the algorithm weights its steps."""
    return sum(
        float((point.advantages * algorithm.log_prob(point, velocity(point, theta)) * point.weights).sum())
        for point in algorithm.training_points(batch, SCHEDULES)
    )
