"""GRPO-Guard's loss against the paper's form in a loop, in float64; what its ratio is; its settings."""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.algorithms.algorithm import Old
from omnirl_hpc.algorithms.grpo_guard import GRPOGuardConfig, normalised_log_ratio
from omnirl_hpc.errors import ConfigError
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


def by_loop(batch, kind, level, clip, rebalance):
    """(loss, gradient). The paper: rho = exp(std (log r + |way|^2 / (2 std^2))), PPO's clip, over dt; for
    cps, whose log r is that of a variance of 1/2, the same with 1 / (2 std) and |way|^2.
    """
    theta = THETA.double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for b, _, t, u, streams in rows(batch, kind, level, theta, OLD.double()):
        mean, old, after, std = joined(streams)
        way = ((mean - old) ** 2).mean()
        log_ratio = log_density(kind, mean, after, std) - log_density(kind, old, after, std)
        if kind == "cps":
            rho = torch.exp((log_ratio + way) / (2 * std))
        else:
            rho = torch.exp(std * (log_ratio + way / (2 * std**2)))
        a = float(batch.advantages[b])
        worst = torch.maximum(-a * rho, -a * rho.clamp(1 - clip, 1 + clip))
        total = total + float(batch.weights[b]) / 3 * worst / ((t - u) if rebalance else 1)
    total.backward()
    return float(total.detach()), theta.grad


@pytest.mark.parametrize(("kind", "level"), KINDS)
@pytest.mark.parametrize(("clip", "rebalance"), [(0.2, True), (0.01, True), (0.2, False)])
def test_value_and_gradient_of_the_papers_form(kind, level, clip, rebalance):
    """With a range that no sample leaves, and one that some do."""
    algorithm = make("grpo_guard", kind, level, clip_range=clip, rebalance=rebalance)
    batch = units(algorithm)
    loss, gradient = loss_and_gradient(algorithm, [batch], THETA, OLD)
    expected, theirs = by_loop(batch, kind, level, clip, rebalance)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert gradient.tolist() == pytest.approx(theirs.tolist(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_the_ratio_is_the_way_of_the_mean_along_the_noise(kind, level):
    """Both of one scale at every step, whatever its variance: (mu - mu_old) z, of 0 bias."""
    algorithm = make("grpo_guard", kind, level)
    batch = units(algorithm)
    for i, point in enumerate(algorithm.training_points(batch, SCHEDULES)):
        observed = algorithm.observe(point, velocity(point, OLD))
        assert isinstance(observed, Old) and observed.means is not None
        point = algorithm.with_old(point, observed)
        got = normalised_log_ratio(point, algorithm.transitions(point, velocity(point, THETA)))
        expected = [
            float(((mean - old) * (after - old) / std).mean())
            for b, k, _, _, streams in rows(batch, kind, level, THETA.double(), OLD.double())
            for mean, old, after, std in [joined(streams)]
            if k == i
        ]
        assert got.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_the_gradients_of_all_steps_are_of_one_size():
    """Of an sde d mu / d v is (1 + eta^2 / 2) dt, so that over dt each step's is the same, but for sigma =
    1.
    """
    algorithm = make("grpo_guard", "sde", 0.7)
    slopes = []
    for point in algorithm.training_points(units(algorithm)[1:2], SCHEDULES):  # at steps 1, 2, 3
        v = {name: x.requires_grad_() for name, x in velocity(point, THETA).items()}
        observed = algorithm.observe(point, {name: x.detach() for name, x in v.items()})
        algorithm.loss(algorithm.with_old(point, observed), {"current": v}).loss.backward()
        drawn = algorithm.transitions(point, v)["video"]
        noise = (point.next_latents["video"] - drawn.mean) / drawn.std
        slopes.append(float((v["video"].grad / noise).detach().mean()))
    assert slopes == pytest.approx([slopes[0]] * 3, rel=1e-3)


def test_the_engines_log_probs_cannot_be_trusted():
    with pytest.raises(ConfigError, match="algorithm.old_log_prob=rollout .*set it to recompute"):
        GRPOGuardConfig(old_log_prob="rollout")
    assert make("grpo_guard").recomputes_old


def test_its_clip_range_has_a_scale_of_its_own():
    """The published one, 2e-6, is reached where velocities of 65536 values move by some thousandths."""
    shapes = {"video": (1024, 32), "audio": (1024, 32)}
    remarks = lambda clip: list(make("grpo_guard", clip_range=clip).remarks(SCHEDULES, shapes))  # noqa: E731
    assert not remarks(2e-6)
    assert "out of scale" in remarks(1e-2)[0] and "out of scale" in remarks(1e-8)[0]
