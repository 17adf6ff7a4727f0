"""The divergence from a teacher against torch.distributions; alone, and added to a policy loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from omnirl_hpc.algorithms.diffusion_opd import DiffusionOPD, DiffusionOPDConfig
from omnirl_hpc.algorithms.flow_grpo import FlowGRPO, FlowGRPOConfig
from omnirl_hpc.config.schema import Config, SamplingConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.policies import CURRENT, REFERENCE, TEACHER
from omnirl_hpc.sampling import transition
from omnirl_hpc.sampling.streams import LATENTS
from tests.algorithms.test_flow_grpo import SHAPE, normal, one, point

SIGMAS = (0.8, 0.6)  # of the points of test_flow_grpo


def make(kind: str = "sde", **settings) -> DiffusionOPD:
    sampling = SamplingConfig(transition=kind, noise_level=0.7)
    return DiffusionOPD(Config(sampling=sampling, algorithm=DiffusionOPDConfig(teacher="a", **settings)))


def analytic(kind: str, x: torch.Tensor, velocity: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """[B] KL divergence of the two Gaussians, per latent dimension, in float64."""

    def gaussian(v: torch.Tensor) -> torch.distributions.Normal:
        step = transition(kind, v, x, *SIGMAS, noise_level=0.7, next_sample=x)
        return torch.distributions.Normal(step.mean.double(), step.std.double().expand_as(step.mean))

    return torch.distributions.kl_divergence(gaussian(velocity), gaussian(other)).mean(dim=(1, 2))


@pytest.mark.parametrize("kind", ["sde", "cps", "dance"])
def test_alone_it_is_the_divergence_of_the_two_transitions_whatever_the_advantages(kind):
    algorithm = make(kind, teacher_coef=0.5, clip_range=0.2)
    at, velocity = point([1.0, 1.5], [3.0, -2.0], [0.75, 0.25], algorithm)
    teacher = velocity + normal(2, *SHAPE, seed=5)
    velocity.requires_grad_()
    output = algorithm.loss(at, {CURRENT: one(velocity), TEACHER: one(teacher)})
    expected = analytic(kind, at.latents[LATENTS], velocity.detach(), teacher)
    torch.testing.assert_close(output.means["kl_teacher"].double(), expected, rtol=1e-4, atol=1e-7)
    wanted = 0.5 * float((expected * at.weights).sum())
    assert float(output.loss.detach()) == pytest.approx(wanted, rel=1e-4)
    output.loss.backward()
    for b, i, j in ((0, 0, 0), (0, 2, 1), (1, 1, 0)):
        h = torch.zeros_like(teacher)
        h[b, i, j] = 1e-2  # the divergence is a square: central differences are exact
        ends = [analytic(kind, at.latents[LATENTS], velocity.detach() + s * h, teacher) for s in (1, -1)]
        slope = 0.5 * float(((ends[0] - ends[1]) * at.weights).sum()) / 2e-2
        assert float(velocity.grad[b, i, j]) == pytest.approx(slope, rel=1e-3, abs=1e-6)


def test_added_it_is_the_sum_of_both_losses():
    algorithm = make(policy_coef=0.3, kl_coef=0.1, clip_range=0.2)
    assert algorithm.policies == (CURRENT, REFERENCE, TEACHER)
    at, velocity = point([1.1, 1.5], [1.0, -2.0], [0.5, 0.5], algorithm)
    velocities = {CURRENT: one(velocity), REFERENCE: one(velocity + 1), TEACHER: one(velocity - 0.5)}
    # max(-A rho, -A clip(rho, 0.8, 1.2)): -1.1 and 3.0
    policy = 0.3 * (0.5 * -1.1 + 0.5 * 3.0)
    x = at.latents[LATENTS]
    apart = lambda other: float(analytic("sde", x, velocity, other[LATENTS]).mean())  # noqa: E731
    expected = policy + 0.1 * apart(velocities[REFERENCE]) + apart(velocities[TEACHER])
    assert float(algorithm.loss(at, velocities).loss) == pytest.approx(expected, rel=1e-4)


def test_the_convention_without_the_step_size():
    """0.2 |dt| times the exact one for an sde; others have no such convention."""
    for kind, factor in (("sde", 0.2), ("cps", 1.0)):
        values = []
        for scale in ("paper", "code"):
            algorithm = make(kind, kl_scale=scale)
            at, velocity = point([1.0], [0.0], [1.0], algorithm)
            given = {CURRENT: one(velocity), TEACHER: one(velocity + 1)}
            values.append(float(algorithm.loss(at, given).loss))
        assert values[1] == pytest.approx(factor * values[0], rel=1e-5)


def test_at_the_teacher_a_group_of_equal_rewards_has_exactly_no_gradient():
    algorithm = make(policy_coef=1.0)
    at, velocity = point([1.0, 1.0], [0.0, 0.0], [0.5, 0.5], algorithm)
    velocity.requires_grad_()
    algorithm.loss(at, {CURRENT: one(velocity), TEACHER: one(velocity.detach().clone())}).loss.backward()
    assert bool((velocity.grad == 0).all())


def test_the_teacher_gets_no_gradient_and_a_sample_of_weight_zero_may_be_nan():
    algorithm = make()
    at, velocity = point([1.0, 1.0], [0.0, 0.0], [1.0, 0.0], algorithm)
    teacher = (velocity + 1).clone()
    teacher[1] = torch.nan
    teacher.requires_grad_()
    velocity.requires_grad_()
    output = algorithm.loss(at, {CURRENT: one(velocity), TEACHER: one(teacher)})
    output.loss.backward()
    assert teacher.grad is None and bool(torch.isfinite(output.loss))


def test_what_it_needs():
    algorithm = make()
    assert algorithm.policies == (CURRENT, TEACHER) and algorithm.given == {TEACHER: "a"}
    assert list(algorithm.remarks({}, {})) == []  # a clip range that clips nothing
    plain = FlowGRPO(Config(algorithm=FlowGRPOConfig()))
    assert plain.given == {}
    assert replace(algorithm.settings, teacher="b").teacher == "b"


@pytest.mark.parametrize(
    ("key", "value"), [("teacher_coef", 0.0), ("policy_coef", -1.0), ("clip_range", 0.0)]
)
def test_settings_check_themselves(key, value):
    with pytest.raises(ConfigError, match=f"^algorithm.{key}={value} "):
        DiffusionOPDConfig(**{"teacher": "a", key: value})
