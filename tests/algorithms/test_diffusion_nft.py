"""DiffusionNFT's loss by hand and against a loop in float64; its draws; the policy that samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from omnirl_hpc.algorithms.algorithm import CLEAN, Algorithm
from omnirl_hpc.algorithms.diffusion_nft import DiffusionNFT, DiffusionNFTConfig, NoisedPoint, old_decay
from omnirl_hpc.algorithms.units import Batch
from omnirl_hpc.config.schema import Config, SamplingConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.policies import CURRENT, OLD, REFERENCE, Blend
from omnirl_hpc.sampling.samples import SampleIdentity, Samples
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import LATENTS, Streams

SHAPES = {"video": (3, 2), "audio": (2, 1)}


def make(steps: int = 4, scale: float = 1.0, **settings) -> DiffusionNFT:
    sampling = SamplingConfig(num_inference_steps=steps, true_cfg_scale=scale)
    return DiffusionNFT(Config(sampling=sampling, algorithm=DiffusionNFTConfig(**settings)))


def normal(seed: int, batch: int = 2) -> Streams:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(batch, *shape, generator=generator) for name, shape in SHAPES.items()}


def scalar(value: float) -> Streams:
    return {LATENTS: torch.tensor([[value]])}


def golden() -> NoisedPoint:
    """x0 = 0.3, eps = -0.7, sigma = 0.4: x = 0.6 x 0.3 - 0.4 x 0.7 = -0.1."""
    return NoisedPoint(
        latents=scalar(-0.1),
        timesteps={LATENTS: torch.tensor([400.0])},
        conditions={},
        negative=None,
        weights=torch.ones(1),
        goodness=torch.tensor([0.8]),
        clean=scalar(0.3),
        sigmas={LATENTS: torch.tensor([0.4])},
    )


@pytest.mark.parametrize(
    ("scale", "clip", "expected"), [("paper", 5.0, 0.6024), ("code", 5.0, 30.12), ("code", 1.0, 6.024)]
)
def test_one_number_by_hand(scale, clip, expected):
    """With v = 0.6, v_old = 0.5, beta = 0.1: v+ = 0.51, v- = 0.49, so that x0± = -0.304 and -0.296, at
    distances 0.604 and 0.596 from x0. In one dimension |d|^2 / |d| = |d|: 0.8 x 0.604 + 0.2 x 0.596; in the
    form of the authors' code times clip / 0.1.
    """
    algorithm = make(beta=0.1, kl_coef=0.0, loss_scale=scale, advantage_clip=clip)
    output = algorithm.loss(golden(), {CURRENT: scalar(0.6), OLD: scalar(0.5)})
    assert float(output.loss) == pytest.approx(expected, rel=1e-5)
    assert output.means["error/positive"].tolist() == pytest.approx([0.604], rel=1e-5)


def point(goodness=(0.8, 0.3), weights=(0.75, 0.25)) -> NoisedPoint:
    return NoisedPoint(
        latents=normal(1),
        timesteps={name: torch.tensor([400.0, 700.0]) for name in SHAPES},
        conditions={},
        negative=None,
        weights=torch.tensor(weights),
        goodness=torch.tensor(goodness),
        clean=normal(2),
        sigmas={name: torch.tensor([0.4, 0.7]) for name in SHAPES},
    )


def flat(streams: Streams) -> torch.Tensor:
    return torch.cat([streams[name].double().flatten(1) for name in SHAPES], dim=1)


def by_loop(at: NoisedPoint, velocities: dict[str, torch.Tensor], beta: float, kl: float) -> float:
    """The formula of the paper, element by element, with the divisor given by what it was at `fixed`."""
    x, x0, total = flat(at.latents), flat(at.clean), 0.0
    for b in range(len(x)):
        sigma = float(at.sigmas["video"][b])
        errors = []
        for sign in (1, -1):
            estimates, fixed = [], []
            for d in range(x.shape[1]):
                old = float(velocities[OLD][b, d])
                for v, into in ((velocities[CURRENT], estimates), (velocities["fixed"], fixed)):
                    mixed = (1 - sign * beta) * old + sign * beta * float(v[b, d])
                    into.append(float(x[b, d]) - sigma * mixed - float(x0[b, d]))
            divisor = max(sum(map(abs, fixed)) / len(fixed), 1e-5)
            errors.append(sum(e * e for e in estimates) / len(estimates) / divisor)
        r = float(at.goodness[b])
        distance = ((velocities[CURRENT][b] - velocities[REFERENCE][b]) ** 2).mean()
        total += float(at.weights[b]) * (r * errors[0] + (1 - r) * errors[1] + kl * float(distance))
    return total


def test_value_and_gradient_of_a_loop_in_float64():
    """Two streams count by their elements. The gradient by central differences, the divisor held fixed."""
    algorithm, at = make(beta=0.3, kl_coef=0.5), point()
    streams = {CURRENT: normal(3), OLD: normal(4), REFERENCE: normal(5)}
    for tensor in streams[CURRENT].values():
        tensor.requires_grad_()
    output = algorithm.loss(at, streams)
    output.loss.backward()
    plain = {name: flat(v).detach() for name, v in streams.items()}
    plain["fixed"] = plain[CURRENT]
    assert float(output.loss) == pytest.approx(by_loop(at, plain, 0.3, 0.5), rel=1e-5)
    gradient = flat({name: tensor.grad for name, tensor in streams[CURRENT].items()})
    for b, d in ((0, 0), (0, 7), (1, 3), (1, 6)):
        step = torch.zeros_like(plain[CURRENT])
        step[b, d] = 1e-5
        ends = [by_loop(at, plain | {CURRENT: plain[CURRENT] + s * step}, 0.3, 0.5) for s in (1, -1)]
        assert float(gradient[b, d]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3, abs=1e-6)


def test_at_beta_1_and_the_old_policy_it_is_the_matching_loss_weighted_by_what_a_sample_is_worth():
    """Then v+ = v and v- = v_old = v: both errors are equal, and their gradients opposite, so that the whole
    gradient is 2 (2 r - 1) times that of half the divided error.
    """
    algorithm, at = make(beta=1.0, kl_coef=0.0), point()
    current = {name: tensor.requires_grad_() for name, tensor in normal(3).items()}
    old = {name: tensor.detach().clone() for name, tensor in current.items()}
    output = algorithm.loss(at, {CURRENT: current, OLD: old})
    torch.testing.assert_close(output.means["error/positive"], output.means["error/negative"])
    output.loss.backward()
    sigma = torch.tensor([0.4, 0.7], dtype=torch.float64)[:, None]
    off = flat(at.latents) - sigma * flat(old) - flat(at.clean)
    size = off.abs().mean(dim=1, keepdim=True)
    slope = -2 * sigma * off / off.shape[1] / size  # of |x0 - x0'|^2 / w by v
    expected = (at.weights * (2 * at.goodness - 1)).double()[:, None] * slope
    gradient = flat({name: tensor.grad for name, tensor in current.items()})
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_a_sample_that_is_neither_good_nor_bad_has_no_gradient_at_the_old_policy():
    """As all samples of a group of equal rewards; at beta = 1 too."""
    algorithm = make(beta=1.0, kl_coef=0.0)
    rewards, groups = torch.tensor([2.0, 2.0]), torch.tensor([0, 0])
    advantages = algorithm.advantages(rewards, groups, torch.ones(2, dtype=torch.bool))
    assert advantages.tolist() == [0, 0]
    current = {name: tensor.requires_grad_() for name, tensor in normal(3).items()}
    old = {name: tensor.detach().clone() for name, tensor in current.items()}
    algorithm.loss(point(goodness=(0.5, 0.5)), {CURRENT: current, OLD: old}).loss.backward()
    assert all(bool((tensor.grad == 0).all()) for tensor in current.values())


def test_a_good_sample_pulls_the_policy_and_a_bad_one_pushes_it():
    algorithm = make(beta=1.0, kl_coef=0.0)
    for goodness, sign in ((1.0, -1), (0.0, 1)):
        at = point(goodness=(goodness, goodness))
        current = {name: tensor.requires_grad_() for name, tensor in normal(3).items()}
        old = {name: tensor.detach().clone() for name, tensor in current.items()}
        algorithm.loss(at, {CURRENT: current, OLD: old}).loss.backward()
        # towards the velocity that leads from x0 to x: (x - x0) / sigma
        wanted = flat({n: (at.latents[n] - at.clean[n]) / at.sigmas[n].reshape(-1, 1, 1) for n in SHAPES})
        moved = flat({name: tensor.grad for name, tensor in current.items()})
        assert float((moved * (wanted - flat(old))).sum()) * sign > 0


def test_a_sample_without_a_reward_counts_nothing_even_if_it_is_nan():
    algorithm, at = make(kl_coef=0.1), point(weights=(1.0, 0.0))
    streams = {CURRENT: normal(3), OLD: normal(4), REFERENCE: normal(5)}
    alone = float(algorithm.loss(at, streams).loss)
    assert float(algorithm.loss(replace(at, goodness=torch.tensor([0.8, torch.nan])), streams).loss) == alone


@pytest.fixture
def batch() -> Batch:
    samples = Samples(
        identity=[SampleIdentity(0, 5, str(i), i) for i in range(3)],
        group=torch.arange(3),
        conditions=[{"embeds": torch.full((1,), float(i))} for i in range(3)],
        negative=[{"embeds": torch.zeros(1)}] * 3,
        clean=normal(6, batch=3),
        version=torch.zeros(3, dtype=torch.int64),
        noise_hash=torch.zeros(3, dtype=torch.int64),
    )
    return Batch(samples, torch.tensor([5.0, -2.5, 0.0]), torch.full((3,), 1 / 3))


SIGMAS = torch.tensor([1.0, 0.9, 0.6, 0.3, 0.0])
SCHEDULES = {name: Schedule(SIGMAS, 1000 * SIGMAS[:-1]) for name in SHAPES}


def test_points_are_at_the_samplers_timesteps_in_an_order_of_each_sample(batch):
    points = list(make().training_points(batch, SCHEDULES))
    assert len(points) == 4
    seen = torch.stack([made.sigmas["video"] for made in points], dim=1)
    assert all(sorted(row) == sorted(SIGMAS[:-1].tolist()) for row in seen.tolist())
    assert len({tuple(row) for row in seen.tolist()}) > 1
    for made in points:
        assert made.negative is None  # no guidance, whatever the samples have
        assert made.goodness.tolist() == [1.0, 0.25, 0.5]
        assert torch.equal(made.timesteps["audio"], 1000 * made.sigmas["audio"])
        noise = {
            n: made.latents[n] - (1 - s.reshape(-1, 1, 1)) * made.clean[n] for n, s in made.sigmas.items()
        }
        assert all(bool((noise[n].flatten(1).std(dim=1) > 0).all()) for n in SHAPES)
    assert sum(float(made.weights.sum()) for made in points) == pytest.approx(1)
    assert len(list(make(timestep_fraction=0.5).training_points(batch, SCHEDULES))) == 2


def test_draws_are_a_samples_own(batch):
    """The same alone, in another order, and when they are made again; others at another step."""
    together = list(make().training_points(batch, SCHEDULES))
    alone = list(make().training_points(batch[[2, 0]], SCHEDULES))
    for a, b in zip(together, alone):
        for name in SHAPES:
            assert torch.equal(a.latents[name][[2, 0]], b.latents[name])
            assert torch.equal(a.timesteps[name][[2, 0]], b.timesteps[name])
    later = replace(batch.units, identity=[replace(who, step=6) for who in batch.units.identity])
    other = next(make().training_points(replace(batch, units=later), SCHEDULES))
    assert not torch.equal(other.latents["video"], together[0].latents["video"])


def test_the_old_policy_samples_by_ode_steps_and_follows():
    algorithm = make(kl_coef=0.0, old_decay="linear", old_every=2)
    assert algorithm.sampler == OLD and algorithm.policies == (CURRENT, OLD)
    assert make().policies == (CURRENT, OLD, REFERENCE)
    assert algorithm.needs == CLEAN and algorithm.window(3) is None and isinstance(algorithm, Algorithm)
    assert [algorithm.after_step(step) for step in (0, 1, 2)] == [(), (Blend(OLD, 0.001),), ()]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("copy", {0: 0.0, 5000: 0.0}),
        ("linear", {0: 0.0, 100: 0.1, 500: 0.5, 5000: 0.5}),
        ("delayed", {75: 0.0, 95: 0.15, 5000: 0.999}),
    ],
)
def test_how_fast_the_old_policy_follows(kind, expected):
    assert {step: old_decay(kind, step) for step in expected} == pytest.approx(expected)


def test_guidance_is_refused():
    with pytest.raises(ConfigError, match="sampling.true_cfg_scale=4.0: .* set it to 1"):
        make(scale=4.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("beta", 0.0),
        ("advantage_clip", -1.0),
        ("old_every", 0),
        ("kl_coef", -1.0),
        ("timestep_fraction", 0.0),
        ("timestep_fraction", 1.5),
        ("advantage_std", "global"),
        ("old_decay", "slow"),
        ("loss_scale", "peer"),
    ],
)
def test_settings_check_themselves(key, value):
    with pytest.raises(ConfigError, match=f"^algorithm.{key}={value} "):
        DiffusionNFTConfig(**{key: value})
