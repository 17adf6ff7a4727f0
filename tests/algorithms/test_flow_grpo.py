"""Flow-GRPO's loss against PPO worked out by hand, and its KL term against torch.distributions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from omnirl_hpc.algorithms.algorithm import weighted_sum
from omnirl_hpc.algorithms.flow_grpo import FlowGRPO, FlowGRPOConfig
from omnirl_hpc.algorithms.trajectory import TransitionPoint, gaussian_kl
from omnirl_hpc.algorithms.units import Batch
from omnirl_hpc.config.schema import Config, SamplingConfig, WindowConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.policies import CURRENT, REFERENCE
from omnirl_hpc.sampling import transition
from omnirl_hpc.sampling.samples import SampleIdentity, Samples, Trajectory
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import LATENTS, Streams

SHAPE = (3, 2)  # tokens, channels


def make(transition_kind: str = "sde", **settings) -> FlowGRPO:
    sampling = SamplingConfig(transition=transition_kind, noise_level=0.7)
    return FlowGRPO(Config(sampling=sampling, algorithm=FlowGRPOConfig(**settings)))


def one(tensor: torch.Tensor) -> Streams:
    return {LATENTS: tensor}


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def point(
    ratios: list[float], advantages: list[float], weights: list[float], algorithm: FlowGRPO
) -> tuple[TransitionPoint, torch.Tensor]:
    """A training point and a velocity [B, S, C] whose likelihood ratios are `ratios`."""
    batch = len(ratios)
    velocity = normal(batch, *SHAPE, seed=0)
    made = TransitionPoint(
        latents=one(normal(batch, *SHAPE, seed=1)),
        timesteps=one(torch.full((batch,), 800.0)),
        conditions={},
        negative=None,
        weights=torch.tensor(weights),
        advantages=torch.tensor(advantages),
        next_latents=one(normal(batch, *SHAPE, seed=2)),
        sigma=one(torch.full((batch,), 0.8)),
        sigma_next=one(torch.full((batch,), 0.6)),
        sigma_max=one(torch.full((batch,), 0.9)),
        rollout_log_prob=torch.zeros(batch),
        old_log_prob=torch.zeros(batch),
    )
    old = algorithm.log_prob(made, one(velocity)) - torch.log(torch.tensor(ratios))
    return replace(made, old_log_prob=old), velocity


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
    output = algorithm.loss(made, {CURRENT: one(velocity)})
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
    algorithm.loss(made, {CURRENT: one(velocity)}).loss.backward()
    assert bool((velocity.grad != 0).any()) == learns


def test_samples_are_summed_by_weight():
    algorithm = make(clip_range=0.2)
    made, velocity = point([1.5, 0.5, 1.1], [2.0, -2.0, 1.0], [0.5, 0.25, 0.25], algorithm)
    # 0.5 x -2.4 + 0.25 x 1.6 + 0.25 x -1.1
    assert float(algorithm.loss(made, {CURRENT: one(velocity)}).loss) == pytest.approx(-1.075, abs=1e-5)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_sample_of_weight_zero_counts_nothing_even_if_it_is_nan(kl_coef):
    algorithm = make(clip_range=0.2, kl_coef=kl_coef)
    velocities = lambda v: {CURRENT: one(v)} | ({REFERENCE: one(v.detach() + 0.1)} if kl_coef else {})  # noqa: E731
    alone, velocity = point([1.1], [1.0], [1.0], algorithm)
    expected = algorithm.loss(alone, velocities(velocity)).loss

    made, velocity = point([1.1, 1.0], [1.0, math.nan], [1.0, 0.0], algorithm)
    made.old_log_prob[1] = math.nan
    made.latents[LATENTS][0] = alone.latents[LATENTS][0]
    made.next_latents[LATENTS][0] = alone.next_latents[LATENTS][0]
    made.old_log_prob[0] = algorithm.log_prob(made, one(velocity))[0] - math.log(1.1)
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
    output = algorithm.loss(made, {CURRENT: one(velocity), REFERENCE: one(reference)})

    x = made.latents[LATENTS]
    step = lambda v: transition(kind, v, x, 0.8, 0.6, noise_level=0.7, next_sample=x)  # noqa: E731
    ours, theirs = step(velocity), step(reference)
    gaussian = lambda s: torch.distributions.Normal(s.mean, s.std.expand_as(s.mean))  # noqa: E731
    analytic = torch.distributions.kl_divergence(gaussian(ours), gaussian(theirs)).mean(
        dim=(1, 2)
    )  # per latent dimension
    torch.testing.assert_close(output.means["kl_reference"], analytic, rtol=1e-5, atol=1e-7)
    assert float(output.loss) == pytest.approx(0.3 * float(analytic.mean()), rel=1e-5)


@pytest.mark.parametrize(("kind", "factor"), [("sde", 0.2), ("cps", 1.0), ("dance", 1.0)])
def test_the_codes_kl_leaves_the_step_size_of_an_sde_out(kind, factor):
    """Whose variance is s^2 in place of s^2 |dt|, here with |dt| = 0.8 - 0.6."""
    values = []
    for scale in ("paper", "code"):
        algorithm = make(kind, kl_coef=0.3, kl_scale=scale)
        made, velocity = point([1.0, 1.0], [0.0, 0.0], [0.5, 0.5], algorithm)
        reference = velocity + normal(2, *SHAPE, seed=5)
        values.append(float(algorithm.loss(made, {CURRENT: one(velocity), REFERENCE: one(reference)}).loss))
    assert values[1] == pytest.approx(factor * values[0], rel=1e-5)


def test_a_kl_coefficient_from_elsewhere_is_remarked_on():
    """Steps 0 to 2 may be trained, of sizes 0.1, 0.3 and 0.2."""
    schedule = Schedule(torch.tensor([1.0, 0.9, 0.6, 0.4, 0.0]), torch.zeros(4))

    def remarks(kind: str = "sde", **settings) -> list[str]:
        window = WindowConfig(size=2, first=0, last=3)
        sampling = SamplingConfig(num_inference_steps=4, transition=kind, noise_level=0.7, window=window)
        algorithm = FlowGRPO(Config(sampling=sampling, algorithm=FlowGRPOConfig(clip_range=0.1, **settings)))
        said = algorithm.remarks({LATENTS: schedule}, {LATENTS: (4, 4)})
        return [text for text in said if "kl_coef" in text]

    (text,) = remarks(kl_coef=0.04)
    assert "algorithm.kl_coef=0.04" in text and "acts 3.33 to 10 times" in text and "kl_scale=code" in text
    assert not remarks() and not remarks(kl_coef=0.04, kl_scale="code") and not remarks("cps", kl_coef=0.04)


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
    algorithm.loss(made, {CURRENT: one(velocity), REFERENCE: one(reference)}).loss.backward()
    assert reference.grad is None and bool((velocity.grad != 0).any())


def test_without_a_kl_coefficient_no_reference_is_needed():
    assert make(kl_coef=0.0).policies == (CURRENT,)
    assert make(old_log_prob="recompute").recomputes_old
    assert not make(old_log_prob="rollout").recomputes_old


def test_a_gap_above_the_clip_range_matters_where_the_engine_is_trusted():
    assert make(old_log_prob="rollout", clip_range=0.03).tolerated_gap == 0.03
    assert make(old_log_prob="recompute", clip_range=0.03).tolerated_gap == math.inf


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("clip_range", 0.0, "must be greater than 0"),
        ("advantage_clip", 0.0, "must be greater than 0"),
        ("kl_coef", -0.1, "must not be negative"),
        ("kl_scale", "peer", "one of: paper, code"),
        ("old_log_prob", "engine", "one of: recompute, rollout"),
        ("advantage_std", "global", "one of: batch, group, null"),
    ],
)
def test_settings_check_themselves(key, value, said):
    with pytest.raises(ConfigError, match=f"^algorithm.{key}={value} .*{said}"):
        FlowGRPOConfig(**{key: value})


@pytest.mark.parametrize("old", ["recompute", "rollout"])
def test_the_ratio_is_to_the_actors_log_probs_or_to_the_trusted_ones(old):
    """The point that was given stays as it is."""
    algorithm = make(old_log_prob=old)
    made, velocity = point([1.0, 1.1], [1.0, 1.0], [0.5, 0.5], algorithm)
    before, log_prob = made.old_log_prob.clone(), algorithm.log_prob(made, one(velocity))
    seen = algorithm.with_old(made, algorithm.observe(made, one(velocity))).old_log_prob
    assert torch.equal(seen, log_prob if old == "recompute" else before)
    assert torch.equal(made.old_log_prob, before)


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
    trajectory = Trajectory(
        latents=one(normal(batch, window + 1, *SHAPE, seed=0)),
        log_probs=normal(batch, window, seed=1),
        sigmas=one(torch.tensor([[0.9, 0.8, 0.6, 0.3], [0.8, 0.6, 0.3, 0.1]])),
        timesteps=one(torch.tensor([[900.0, 800.0, 600.0], [800.0, 600.0, 300.0]])),
        sigma_max=one(torch.full((batch,), 0.95)),
    )
    samples = Samples(
        identity=[SampleIdentity(0, 0, str(i), 0) for i in range(batch)],
        group=torch.tensor([0, 1]),
        conditions=[{"embeds": torch.full((1, 1), float(i))} for i in range(batch)],
        negative=None,
        clean=one(normal(batch, *SHAPE, seed=3)),
        version=torch.tensor([1, 1]),
        noise_hash=torch.zeros(2, dtype=torch.int64),
        trajectory=trajectory,
    )
    batch = Batch(samples, torch.tensor([1.0, -1.0]), torch.tensor([0.6, 0.4]))
    algorithm = make()
    algorithm.config.sampling.window.size = window
    points = list(algorithm.training_points(batch, schedules={}))
    assert len(points) == window
    for i, made in enumerate(points):
        for got, expected in (
            (made.latents, trajectory.latents[LATENTS][:, i]),
            (made.next_latents, trajectory.latents[LATENTS][:, i + 1]),
            (made.timesteps, trajectory.timesteps[LATENTS][:, i]),
            (made.sigma, trajectory.sigmas[LATENTS][:, i]),
            (made.sigma_next, trajectory.sigmas[LATENTS][:, i + 1]),
        ):
            assert torch.equal(got[LATENTS], expected)
        assert torch.equal(made.rollout_log_prob, trajectory.log_probs[:, i])
        assert made.conditions["embeds"].flatten().tolist() == [0.0, 1.0]
        assert torch.equal(made.old_log_prob, trajectory.log_probs[:, i])  # until recomputed
        assert made.sigma_max[LATENTS].tolist() == pytest.approx([0.95, 0.95])
        assert made.weights.tolist() == pytest.approx([0.6 / 3, 0.4 / 3])
        assert made.advantages.tolist() == [1.0, -1.0]
    assert sum(float(made.weights.sum()) for made in points) == pytest.approx(1.0)  # of the update


def test_two_streams_count_by_their_elements():
    """As one tensor of all elements would: log-probability and KL of 6 + 2 elements."""
    algorithm, batch = make(kl_coef=0.3), 2
    shapes = {"video": (3, 2), "audio": (2, 1)}

    def streams(seed: int) -> Streams:
        return {name: normal(batch, *shape, seed=seed) for name, shape in shapes.items()}

    def flat(tensors: Streams) -> torch.Tensor:
        return torch.cat([tensors[name].flatten(1) for name in shapes], dim=1)

    x, following, velocity, reference = (streams(seed) for seed in range(4))
    same = lambda value: {name: torch.full((batch,), value) for name in shapes}  # noqa: E731
    made = TransitionPoint(
        latents=x,
        timesteps=same(800.0),
        conditions={},
        negative=None,
        weights=torch.full((batch,), 0.5),
        advantages=torch.ones(batch),
        next_latents=following,
        sigma=same(0.8),
        sigma_next=same(0.6),
        sigma_max=same(0.9),
        rollout_log_prob=torch.zeros(batch),
        old_log_prob=torch.zeros(batch),
    )
    step = lambda v: transition(  # noqa: E731
        "sde", flat(v), flat(x), 0.8, 0.6, noise_level=0.7, next_sample=flat(following)
    )
    torch.testing.assert_close(algorithm.log_prob(made, velocity), step(velocity).log_prob)
    output = algorithm.loss(made, {CURRENT: velocity, REFERENCE: reference})
    expected = gaussian_kl(step(velocity).mean, step(reference).mean, step(velocity).std)
    torch.testing.assert_close(output.means["kl_reference"], expected)
