"""AWM's loss by hand and against a loop in float64; its weights and draws; the policy it stays near."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from omnirl_hpc.algorithms.algorithm import CLEAN
from omnirl_hpc.algorithms.awm import AWM, AWMConfig, MatchingPoint, strata, weighted_error
from omnirl_hpc.algorithms.units import Batch
from omnirl_hpc.config.schema import Config, SamplingConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.policies import CURRENT, OLD, REFERENCE, Blend
from omnirl_hpc.sampling.samples import SampleIdentity, Samples
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import LATENTS, Streams

SHAPES = {"video": (3, 2), "audio": (2, 1)}


def make(steps: int = 8, **settings) -> AWM:
    settings = {"points_per_sample": 2} | settings
    sampling = SamplingConfig(num_inference_steps=steps, true_cfg_scale=1.0)
    return AWM(Config(sampling=sampling, algorithm=AWMConfig(**settings)))


def normal(seed: int, batch: int = 3) -> Streams:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(batch, *shape, generator=generator) for name, shape in SHAPES.items()}


def scalar(value: float) -> Streams:
    return {LATENTS: torch.tensor([[value]])}


def flat(streams: Streams) -> torch.Tensor:
    return torch.cat([streams[name].double().flatten(1) for name in SHAPES], dim=1)


def point(advantages=(0.8, -0.4, 0.3), weights=(0.5, 0.25, 0.25), old=(-1.5, -0.9, -1.2)) -> MatchingPoint:
    return MatchingPoint(
        latents=normal(1),
        timesteps={name: torch.full((3,), 500.0) for name in SHAPES},
        conditions={},
        negative=None,
        weights=torch.tensor(weights),
        advantages=torch.tensor(advantages),
        target=normal(2),
        levels=torch.tensor([0.4, 0.7, 0.9]),
        rollout_log_prob=torch.zeros(3),
        old_log_prob=torch.tensor(old),
    )


def test_one_number_by_hand():
    """An error of 0.0625 at t = 0.8: ghuber with p = 1/4 costs 0.8 x 4 x 0.5 = 1.6, and with an old
    log-probability of -1.7 the ratio is e^0.1; A = 0.5, distances 0.25 to the old policy and 0.01 to the
    reference: -0.5 e^0.1 + 0.3 x 0.01 + 2 x 0.25.
    """
    at = MatchingPoint(
        latents=scalar(0.0),
        timesteps={LATENTS: torch.tensor([800.0])},
        conditions={},
        negative=None,
        weights=torch.ones(1),
        advantages=torch.tensor([0.5]),
        target=scalar(0.35),
        levels=torch.tensor([0.8]),
        rollout_log_prob=torch.zeros(1),
        old_log_prob=torch.tensor([-1.7]),
    )
    algorithm = make(kl_coef=0.3, old_coef=2.0)
    output = algorithm.loss(at, {CURRENT: scalar(0.6), OLD: scalar(0.1), REFERENCE: scalar(0.5)})
    # 1e-10 beneath the root is (1e-10)^(1/4) = 0.003 at an error of 0: 0.8 x 4 x 0.003 = 0.01 less
    cost = 0.8 * 4 * (0.5 - 10**-2.5)
    expected = -0.5 * math.exp(1.7 - cost) + 0.3 * 0.01 + 2.0 * 0.25
    assert float(output.loss) == pytest.approx(expected, rel=1e-5)
    assert output.means["distance/old"].tolist() == pytest.approx([0.25])


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [("uniform", 0.16), ("t", 0.08), ("t2", 0.04), ("huber", 0.5 * (0.4 - 1e-5)), ("ghuber", None)],
)
def test_weightings(weighting, expected):
    """An error of 0.16 at t = 0.5; ghuber with p = 0.3."""
    if weighting == "ghuber":
        expected = 0.5 * (0.16**0.3 - 1e-10**0.3) / 0.3
    levels = torch.tensor([0.5, 0.5])
    cost = weighted_error(torch.tensor([0.16, 0.0]), levels, weighting, 0.3)
    assert cost.tolist() == pytest.approx([expected, 0.0], rel=1e-5, abs=1e-9)


def by_loop(at: MatchingPoint, velocities: dict[str, torch.Tensor], settings: AWMConfig) -> float:
    target, total = flat(at.target), 0.0
    for b in range(len(target)):
        differences = {
            name: [float(a - b) for a, b in zip(velocities[CURRENT][b], other[b])]
            for name, other in (velocities | {"target": target}).items()
        }
        squares = {name: sum(d * d for d in row) / len(row) for name, row in differences.items()}
        p, t = settings.ghuber_power, float(at.levels[b])
        log_prob = -t * ((squares["target"] + 1e-10) ** p - 1e-10**p) / p
        ratio, a = math.exp(log_prob - float(at.old_log_prob[b])), float(at.advantages[b])
        clipped = min(max(ratio, 1 - settings.clip_range), 1 + settings.clip_range)
        loss = max(-a * ratio, -a * clipped)
        loss += settings.kl_coef * squares[REFERENCE] + settings.old_coef * squares[OLD]
        total += float(at.weights[b]) * loss
    return total


@pytest.mark.parametrize("clip_range", [1.0, 0.1])
def test_value_and_gradient_of_a_loop_in_float64(clip_range):
    """Two streams count by their elements. The gradient by central differences."""
    algorithm, at = make(clip_range=clip_range, kl_coef=0.2, old_coef=0.7), point()
    streams = {CURRENT: normal(3), OLD: normal(4), REFERENCE: normal(5)}
    for tensor in streams[CURRENT].values():
        tensor.requires_grad_()
    output = algorithm.loss(at, streams)
    output.loss.backward()
    plain = {name: flat(v).detach() for name, v in streams.items()}
    assert float(output.loss.detach()) == pytest.approx(by_loop(at, plain, algorithm.settings), rel=1e-5)
    gradient = flat({name: tensor.grad for name, tensor in streams[CURRENT].items()})
    for b, d in ((0, 0), (0, 7), (1, 3), (2, 6)):
        step = torch.zeros_like(plain[CURRENT])
        step[b, d] = 1e-5
        ends = [
            by_loop(at, plain | {CURRENT: plain[CURRENT] + s * step}, algorithm.settings) for s in (1, -1)
        ]
        assert float(gradient[b, d]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3, abs=1e-6)


def test_at_the_first_update_the_gradient_is_that_of_the_advantage_times_the_matching_loss():
    """With the weighting `uniform`, the paper's own objective."""
    algorithm = make(weighting="uniform", kl_coef=0.0, old_coef=0.0)
    at, current = point(), {name: tensor.requires_grad_() for name, tensor in normal(3).items()}
    old = algorithm.log_prob(at, {name: tensor.detach() for name, tensor in current.items()})
    algorithm.loss(replace(at, old_log_prob=old), {CURRENT: current}).loss.backward()
    target = flat(at.target)
    expected = 2 * (flat(current).detach() - target) / target.shape[1]
    expected *= (at.advantages * at.weights)[:, None]
    got = flat({name: tensor.grad for name, tensor in current.items()})
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_a_group_of_equal_rewards_has_no_gradient_where_nothing_is_to_be_kept_near():
    algorithm = make(kl_coef=0.0, old_coef=0.0)
    groups, mask = torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)
    advantages = algorithm.advantages(torch.full((3,), 0.1), groups, mask)
    current = {name: tensor.requires_grad_() for name, tensor in normal(3).items()}
    algorithm.loss(point(advantages=advantages.tolist()), {CURRENT: current}).loss.backward()
    assert all(bool((tensor.grad == 0).all()) for tensor in current.values())


def test_a_sample_without_a_reward_counts_nothing_even_if_it_is_nan():
    algorithm, streams = make(), {CURRENT: normal(3), OLD: normal(4), REFERENCE: normal(5)}
    at = point(weights=(1.0, 0.0, 0.0))
    alone = algorithm.loss(at, streams).loss
    broken = replace(at, old_log_prob=torch.tensor([-1.5, torch.nan, 0.0]))
    current = {name: tensor.requires_grad_() for name, tensor in normal(3).items()}
    output = algorithm.loss(broken, streams | {CURRENT: current})
    output.loss.backward()
    assert float(output.loss.detach()) == float(alone)
    assert all(bool((tensor.grad[1] == 0).all()) for tensor in current.values())


def test_advantages_are_clipped_and_scaled_to_one():
    rewards, groups = torch.tensor([0.0, 8.0, 1.0, 3.0]), torch.tensor([0, 0, 1, 1])
    got = make(advantage_std=None, advantage_clip=2.0).advantages(rewards, groups, torch.ones(4).bool())
    assert got.tolist() == [-1.0, 1.0, -0.5, 0.5]  # means 4 and 2


@pytest.fixture
def batch() -> Batch:
    samples = Samples(
        identity=[SampleIdentity(0, 5, str(i), i) for i in range(3)],
        group=torch.arange(3),
        conditions=[{"embeds": torch.full((1,), float(i))} for i in range(3)],
        negative=None,
        clean=normal(6),
        version=torch.zeros(3, dtype=torch.int64),
        noise_hash=torch.zeros(3, dtype=torch.int64),
    )
    return Batch(samples, torch.tensor([1.0, -0.5, 0.0]), torch.full((3,), 1 / 3))


SIGMAS = torch.tensor([1.0, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3, 0.1, 0.0])
SCHEDULES = {name: Schedule(SIGMAS, 1000 * SIGMAS[:-1]) for name in SHAPES}


def test_points_are_one_in_each_part_of_the_samplers_timesteps(batch):
    """Seven of eight without the first: steps 1 to 6 in three parts of two."""
    algorithm = make(points_per_sample=3, timestep_fraction=0.9)
    points = list(algorithm.training_points(batch, SCHEDULES))
    assert len(points) == algorithm.points_per_unit == 3
    for made, part in zip(points, ([0.95, 0.9], [0.8, 0.7], [0.5, 0.3])):
        assert set(made.levels.tolist()) <= set(torch.tensor(part).tolist())
        assert torch.equal(made.timesteps["audio"], 1000 * made.levels)
        for name in SHAPES:  # x - sigma (eps - x0) = x0
            level = made.levels.reshape(-1, 1, 1)
            clean = made.latents[name] - level * made.target[name]
            torch.testing.assert_close(clean, batch.units.clean[name], rtol=1e-5, atol=1e-5)
    assert sum(float(made.weights.sum()) for made in points) == pytest.approx(1)


def test_the_parts_of_the_authors_fourteen_steps():
    """floor(linspace(1, 12, 7)), as in their code for time_type=discrete_wo_init."""
    bounds = [(1, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12)]
    assert strata(1, int(14 * 0.9), 6) == bounds


def test_draws_are_a_samples_own(batch):
    together = list(make(points_per_sample=3).training_points(batch, SCHEDULES))
    alone = list(make(points_per_sample=3).training_points(batch[[2, 0]], SCHEDULES))
    for a, b in zip(together, alone):
        for name in SHAPES:
            assert torch.equal(a.latents[name][[2, 0]], b.latents[name])
            assert torch.equal(a.timesteps[name][[2, 0]], b.timesteps[name])
    assert not torch.equal(together[0].target["video"], together[1].target["video"])


def test_what_it_needs():
    algorithm = make()
    assert algorithm.needs == CLEAN and algorithm.window(0) is None and not algorithm.engine_scores
    assert algorithm.policies == (CURRENT, OLD, REFERENCE) and algorithm.sampler == CURRENT
    decays = {step: algorithm.after_step(step) for step in (0, 100, 300, 5000)}
    expected = {0: 0.0, 100: 0.1, 300: 0.3, 5000: 0.3}
    assert decays == {step: (Blend(OLD, decay),) for step, decay in expected.items()}
    alone = make(kl_coef=0.0, old_coef=0.0)
    assert alone.policies == (CURRENT,) and list(alone.after_step(0)) == []


def test_more_points_than_timesteps_are_refused():
    with pytest.raises(ConfigError, match="points_per_sample=7 is more than the 6 timesteps"):
        make(points_per_sample=7)
    assert make(points_per_sample=8, timestep_fraction=1.0, skip_first=False).points_per_unit == 8


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weighting", "cube"),
        ("ghuber_power", 0.0),
        ("clip_range", 0.0),
        ("advantage_clip", -1.0),
        ("advantage_std", "global"),
        ("kl_coef", -1.0),
        ("old_coef", -1.0),
        ("old_decay", 1.0),
        ("points_per_sample", 0),
        ("timestep_fraction", 1.5),
    ],
)
def test_settings_check_themselves(key, value):
    with pytest.raises(ConfigError, match=f"^algorithm.{key}={value} "):
        AWMConfig(**{key: value})
