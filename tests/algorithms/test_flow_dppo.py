"""Flow-DPPO's mask and loss against a loop in float64; its divergence against torch.distributions."""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.algorithms.flow_dppo import FlowDPPOConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.policies import CURRENT
from tests.algorithms.cases import (
    SCHEDULES,
    joined,
    log_density,
    loss_and_gradient,
    make,
    rows,
    units,
    velocity,
)

THETA, OLD = torch.tensor([0.5, -0.3, 0.7]), torch.tensor([0.45, -0.32, 0.72])
KINDS = [("sde", 0.7), ("cps", 0.8), ("dance", 0.3)]


def divergence_of(mean, old, std) -> float:
    normal = torch.distributions.Normal
    return float(torch.distributions.kl_divergence(normal(mean, std), normal(old, std)).mean())


def by_loop(batch, kind, level, threshold):
    theta = THETA.double().requires_grad_()
    total, masked = torch.zeros((), dtype=torch.float64), 0
    for b, _, _, _, streams in rows(batch, kind, level, theta, OLD.double()):
        mean, old, after, std = joined(streams)
        rho = torch.exp(log_density(kind, mean, after, std) - log_density(kind, old, after, std))
        a = float(batch.advantages[b])
        goes_on = (a > 0 and rho > 1) or (a < 0 and rho < 1)
        if goes_on and divergence_of(mean.detach(), old, std) > threshold:
            masked += 1
        else:
            total = total + float(batch.weights[b]) / 3 * -a * rho
    total.backward()
    return float(total.detach()), theta.grad, masked


@pytest.mark.parametrize(("kind", "level"), KINDS)
@pytest.mark.parametrize("quantile", [0.0, 0.5, 1.0])
def test_value_and_gradient_of_the_papers_form(kind, level, quantile):
    """With thresholds below, amid and above the divergences that there are."""
    algorithm = make("flow_dppo", kind, level)
    batch = units(algorithm)
    made = [joined(s) for *_, s in rows(batch, kind, level, THETA.double(), OLD.double())]
    divergences = torch.tensor([divergence_of(mean, old, std) for mean, old, _, std in made])
    threshold = float(divergences.quantile(quantile)) * (1 + 1e-3) + 1e-12
    algorithm = make("flow_dppo", kind, level, kl_threshold=threshold)
    expected, theirs, masked = by_loop(batch, kind, level, threshold)
    loss, gradient = loss_and_gradient(algorithm, [batch], THETA, OLD)
    assert (masked == 0) == (quantile == 1.0)
    assert loss == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert gradient.tolist() == pytest.approx(theirs.tolist(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_the_divergence_is_that_of_the_two_transitions(kind, level):
    algorithm = make("flow_dppo", kind, level)
    batch = units(algorithm)
    expected = [
        [
            divergence_of(mean, old, std)
            for b, k, _, _, s in rows(batch, kind, level, THETA.double(), OLD.double())
            if k == i
            for mean, old, _, std in [joined(s)]
        ]
        for i in range(3)
    ]
    for i, point in enumerate(algorithm.training_points(batch, SCHEDULES)):
        point = algorithm.with_old(point, algorithm.observe(point, velocity(point, OLD)))
        output = algorithm.loss(point, {CURRENT: velocity(point, THETA)})
        assert output.means["divergence/old"].tolist() == pytest.approx(expected[i], rel=1e-3)


def test_means_are_kept_whoever_gave_the_log_probs():
    trusting = make("flow_dppo", old_log_prob="rollout")
    assert trusting.recomputes_old
    (point, *_) = trusting.training_points(units(trusting), SCHEDULES)
    seen = trusting.with_old(point, trusting.observe(point, velocity(point, OLD)))
    assert torch.equal(seen.old_log_prob, point.rollout_log_prob) and seen.old_means is not None


def test_its_threshold_has_a_scale_of_its_own():
    shapes = {"video": (1024, 32), "audio": (1024, 32)}
    said = {
        t: list(make("flow_dppo", kl_threshold=t).remarks(SCHEDULES, shapes)) for t in (1e-5, 10.0, 1e-12)
    }
    assert not said[1e-5]
    assert all(text.startswith("algorithm.kl_threshold=") for t in (10.0, 1e-12) for text in said[t])
    assert said[10.0] and said[1e-12]


def test_settings_check_themselves():
    with pytest.raises(ConfigError, match="algorithm.kl_threshold=0 must be greater than 0"):
        FlowDPPOConfig(kl_threshold=0)
