"""Flow-GRPO's loss against PPO worked out by hand, and its KL term against torch.distributions."""

from __future__ import annotations

import math

import pytest
import torch

from omnirl_hpc.algorithms.algorithm import TrainingPoint, weighted_sum
from omnirl_hpc.algorithms.flow_grpo import FlowGRPO, gaussian_kl
from omnirl_hpc.config.schema import Config, FlowGRPOConfig, SamplingConfig
from omnirl_hpc.policies import CURRENT, REFERENCE
from omnirl_hpc.sampling import transition
from omnirl_hpc.sampling.trajectories import TextEmbeds, Trajectories

SHAPE = (3, 2)  # tokens, channels


def make(transition_kind: str = "sde", **settings) -> FlowGRPO:
    sampling = SamplingConfig(transition=transition_kind, noise_level=0.7)
    return FlowGRPO(Config(sampling=sampling, algorithm=FlowGRPOConfig(**settings)))


def text(batch: int) -> TextEmbeds:
    return TextEmbeds(torch.zeros(batch, 1, 1), torch.ones(batch, 1, dtype=torch.bool), batch_size=[batch])


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def point(
    ratios: list[float], advantages: list[float], weights: list[float], algorithm: FlowGRPO
) -> tuple[TrainingPoint, torch.Tensor]:
    """A training point and a velocity [B, S, C] whose likelihood ratios are `ratios`."""
    batch = len(ratios)
    velocity = normal(batch, *SHAPE, seed=0)
    made = TrainingPoint(
        latents=normal(batch, *SHAPE, seed=1),
        timesteps=torch.full((batch,), 800.0),
        text=text(batch),
        negative=None,
        advantages=torch.tensor(advantages),
        weights=torch.tensor(weights),
        extras={
            "next_latents": normal(batch, *SHAPE, seed=2),
            "sigma": torch.full((batch,), 0.8),
            "sigma_next": torch.full((batch,), 0.6),
            "sigma_max": torch.full((batch,), 0.9),
        },
    )
    made.extras["old_log_prob"] = algorithm.log_prob(made, velocity) - torch.log(torch.tensor(ratios))
    return made, velocity


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        # PPO with eps = 0.2: max(-A rho, -A clip(rho, 0.8, 1.2))
        (1.0, 2.0, -2.0),
        (1.1, 2.0, -2.2),
        (1.5, 2.0, -2.4),  # above the range, good sample: clipped
        (1.5, -2.0, 3.0),  # above the range, bad sample: not clipped
        (0.5, 2.0, -1.0),  # below the range, good sample: not clipped
        (0.5, -2.0, 1.6),  # below the range, bad sample: clipped
    ],
)
def test_clipping(ratio, advantage, expected):
    algorithm = make(clip_range=0.2)
    made, velocity = point([ratio], [advantage], [1.0], algorithm)
    output = algorithm.loss(made, {CURRENT: velocity})
    assert float(output.loss) == pytest.approx(expected, abs=1e-5)
    assert output.means["ratio/mean"].tolist() == pytest.approx([ratio], abs=1e-5)
    assert output.means["clip_fraction"].tolist() == [float(abs(ratio - 1) > 0.2)]
    assert output.means["kl"].tolist() == pytest.approx([ratio - 1 - math.log(ratio)], abs=1e-5)
    assert float(output.maxima["ratio/max_abs_log"]) == pytest.approx(abs(math.log(ratio)), abs=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "learns"),
    [(1.5, 2.0, False), (0.5, -2.0, False), (1.5, -2.0, True), (0.5, 2.0, True)],
)
def test_a_clipped_sample_has_no_gradient(ratio, advantage, learns):
    algorithm = make(clip_range=0.2)
    made, velocity = point([ratio], [advantage], [1.0], algorithm)
    velocity.requires_grad_()
    algorithm.loss(made, {CURRENT: velocity}).loss.backward()
    assert bool((velocity.grad != 0).any()) == learns


def test_samples_are_summed_by_weight():
    algorithm = make(clip_range=0.2)
    made, velocity = point([1.5, 0.5, 1.1], [2.0, -2.0, 1.0], [0.5, 0.25, 0.25], algorithm)
    # 0.5 x -2.4 + 0.25 x 1.6 + 0.25 x -1.1
    assert float(algorithm.loss(made, {CURRENT: velocity}).loss) == pytest.approx(-1.075, abs=1e-5)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_sample_of_weight_zero_counts_nothing_even_if_it_is_nan(kl_coef):
    algorithm = make(clip_range=0.2, kl_coef=kl_coef)
    velocities = lambda v: {CURRENT: v} | ({REFERENCE: v.detach() + 0.1} if kl_coef else {})  # noqa: E731
    alone, velocity = point([1.1], [1.0], [1.0], algorithm)
    expected = algorithm.loss(alone, velocities(velocity)).loss

    made, velocity = point([1.1, 1.0], [1.0, math.nan], [1.0, 0.0], algorithm)
    made.extras["old_log_prob"][1] = math.nan
    made.latents[0], made.extras["next_latents"][0] = alone.latents[0], alone.extras["next_latents"][0]
    made.extras["old_log_prob"][0] = algorithm.log_prob(made, velocity)[0] - math.log(1.1)
    velocity.requires_grad_()
    output = algorithm.loss(made, velocities(velocity))
    output.loss.backward()
    torch.testing.assert_close(output.loss.detach(), expected, rtol=1e-5, atol=1e-6)
    assert bool(torch.isfinite(velocity.grad).all()) and bool((velocity.grad[1] == 0).all())
    assert float(output.maxima["ratio/max_abs_log"]) == pytest.approx(math.log(1.1), abs=1e-5)


def test_weighted_sum_ignores_what_weighs_nothing():
    values = torch.tensor([1.0, math.nan, math.inf, 4.0])
    assert float(weighted_sum(values, torch.tensor([0.5, 0.0, 0.0, 0.25]))) == 1.5


@pytest.mark.parametrize("kind", ["sde", "cps", "dance"])
def test_kl_term_is_the_kl_of_the_two_transitions(kind):
    algorithm = make(kind, clip_range=0.2, kl_coef=0.3)
    assert algorithm.policies == (CURRENT, REFERENCE)
    made, velocity = point(
        [1.0, 1.0], [0.0, 0.0], [0.5, 0.5], algorithm
    )  # advantages of 0: only the KL is left
    reference = velocity + normal(2, *SHAPE, seed=5)
    output = algorithm.loss(made, {CURRENT: velocity, REFERENCE: reference})

    step = lambda v: transition(kind, v, made.latents, 0.8, 0.6, noise_level=0.7, next_sample=made.latents)  # noqa: E731
    ours, theirs = step(velocity), step(reference)
    gaussian = lambda s: torch.distributions.Normal(s.mean, s.std.expand_as(s.mean))  # noqa: E731
    analytic = torch.distributions.kl_divergence(gaussian(ours), gaussian(theirs)).mean(
        dim=(1, 2)
    )  # per latent dimension
    torch.testing.assert_close(output.means["kl_reference"], analytic, rtol=1e-5, atol=1e-7)
    assert float(output.loss) == pytest.approx(0.3 * float(analytic.mean()), rel=1e-5)


def test_kl_of_two_gaussians_by_hand():
    # (0.5)^2 / (2 x 0.25^2) = 2 in each of two dimensions
    assert gaussian_kl(
        torch.tensor([[1.0, 1.0]]), torch.tensor([[0.5, 1.5]]), torch.tensor([[0.25]])
    ).tolist() == [2.0]


def test_the_reference_gets_no_gradient():
    algorithm = make(kl_coef=0.3)
    made, velocity = point([1.0], [0.0], [1.0], algorithm)
    reference = (velocity + 1).requires_grad_()
    velocity.requires_grad_()
    algorithm.loss(made, {CURRENT: velocity, REFERENCE: reference}).loss.backward()
    assert reference.grad is None and bool((velocity.grad != 0).any())


def test_without_a_kl_coefficient_no_reference_is_needed():
    assert make(kl_coef=0.0).policies == (CURRENT,)
    assert make(old_log_prob="recompute").recomputes_old_log_prob
    assert not make(old_log_prob="rollout").recomputes_old_log_prob


def test_a_gap_above_the_clip_range_matters_where_the_engine_is_trusted():
    assert make(old_log_prob="rollout", clip_range=0.03).tolerated_gap == 0.03
    assert make(old_log_prob="recompute", clip_range=0.03).tolerated_gap == math.inf


@pytest.mark.parametrize("old", ["recompute", "rollout"])
def test_before_the_first_update_the_policy_is_compared_with_the_engine(old):
    algorithm = make(old_log_prob=old)
    made, velocity = point([1.0, 1.1], [1.0, 1.0], [0.5, 0.5], algorithm)
    log_prob, before = algorithm.log_prob(made, velocity), made.extras["old_log_prob"]
    made.extras["rollout_log_prob"] = log_prob + torch.tensor([0.25, -0.5])
    assert algorithm.before_first_update(made, velocity).tolist() == pytest.approx([0.25, 0.5], abs=1e-6)
    assert torch.equal(made.extras["old_log_prob"], log_prob if old == "recompute" else before)


@pytest.mark.parametrize(("std", "expected"), [(None, [-1, 1, -1, 1]), ("batch", [-0.774537, 0.774537] * 2)])
def test_advantages_follow_the_settings(std, expected):  # the numbers of test_advantages.py
    rewards, groups, mask = (
        torch.tensor([1.0, 3.0, 0.0, 2.0]),
        torch.tensor([0, 0, 1, 1]),
        torch.ones(4, dtype=torch.bool),
    )
    assert make(advantage_std=std).advantages(rewards, groups, mask).tolist() == pytest.approx(
        expected, abs=1e-6
    )
    assert make(advantage_std=None, advantage_clip=0.5).advantages(rewards, groups, mask).tolist() == [
        -0.5,
        0.5,
        -0.5,
        0.5,
    ]


def test_one_training_point_for_each_step_of_the_window():
    batch, window = 2, 3
    trajectories = Trajectories(
        latents=normal(batch, window + 1, *SHAPE, seed=0),
        log_probs=normal(batch, window, seed=1),
        sigmas=torch.tensor([[0.9, 0.8, 0.6, 0.3], [0.8, 0.6, 0.3, 0.1]]),
        timesteps=torch.tensor([[900.0, 800.0, 600.0], [800.0, 600.0, 300.0]]),
        sigma_max=torch.full((batch,), 0.95),
        text=text(batch),
        negative=None,
        images=torch.zeros(batch, 3, 8, 8, dtype=torch.uint8),
        group=torch.tensor([0, 1]),
        sample=torch.tensor([0, 0]),
        noise_hash=torch.zeros(2, dtype=torch.int64),
        version=torch.tensor([1, 1]),
        batch_size=[batch],
    )
    points = make().training_points(trajectories, torch.tensor([1.0, -1.0]), torch.tensor([0.6, 0.4]))
    assert len(points) == window
    for i, made in enumerate(points):
        assert torch.equal(made.latents, trajectories.latents[:, i])
        assert torch.equal(made.extras["next_latents"], trajectories.latents[:, i + 1])
        assert torch.equal(made.timesteps, trajectories.timesteps[:, i])
        assert torch.equal(made.extras["sigma"], trajectories.sigmas[:, i])
        assert torch.equal(made.extras["sigma_next"], trajectories.sigmas[:, i + 1])
        assert torch.equal(made.extras["rollout_log_prob"], trajectories.log_probs[:, i])
        assert torch.equal(made.extras["old_log_prob"], trajectories.log_probs[:, i])  # until recomputed
        assert made.extras["sigma_max"].tolist() == pytest.approx([0.95, 0.95])
        assert made.weights.tolist() == pytest.approx([0.6 / 3, 0.4 / 3])
        assert made.advantages.tolist() == [1.0, -1.0]
    assert sum(float(made.weights.sum()) for made in points) == pytest.approx(1.0)  # of the update
