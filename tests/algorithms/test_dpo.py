"""DPO's loss by hand, and what the two samples of a pair share."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from omnirl_hpc.algorithms.algorithm import PAIRS, PREFERENCES
from omnirl_hpc.algorithms.dpo import DPO, DPOConfig, PairPoint, preference
from omnirl_hpc.algorithms.units import Batch, Pairs
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.policies import CURRENT, REFERENCE
from omnirl_hpc.sampling.samples import SampleIdentity
from omnirl_hpc.sampling.streams import LATENTS, Streams


def make(beta: float = 100.0) -> DPO:
    return DPO(Config(algorithm=DPOConfig(beta=beta)))


def one(tensor: torch.Tensor) -> Streams:
    return {LATENTS: tensor}


def point(weights: tuple[float, ...] = (1.0,)) -> PairPoint:
    rows = 2 * len(weights)
    return PairPoint(
        latents=one(torch.zeros(rows, 1)),
        timesteps=one(torch.zeros(rows)),
        conditions={},
        negative=None,
        weights=torch.tensor(weights),
        target=one(torch.zeros(rows, 1)),
    )


def off_by(*errors: float) -> Streams:
    """Velocities whose squared errors are `errors`."""
    return one(torch.tensor(errors).sqrt()[:, None])


def test_one_pair_by_hand():
    """Errors .010 of the policy and .012 of the reference for the chosen, .020 and .019 for the rejected: the
    logit is 50 x (.002 + .001) = .15, and log(1 + e^-.15) = .620957.
    """
    output = make().loss(point(), {CURRENT: off_by(0.010, 0.020), REFERENCE: off_by(0.012, 0.019)})
    assert output.means["preference/margin"].tolist() == pytest.approx([0.15], rel=1e-4)
    assert float(output.loss) == pytest.approx(0.620957, abs=1e-6)
    assert float(output.loss) == pytest.approx(math.log1p(math.exp(-0.15)), abs=1e-5)
    assert output.means["preference/accuracy"].tolist() == [1.0]
    assert float(preference(torch.tensor(0.002), torch.tensor(-0.001), 100.0)) == pytest.approx(0.15)


def test_at_the_reference_no_preference_is_known_and_the_gradient_is_that_of_half_beta():
    """loss = log 2; d loss / d error = beta / 4 for the chosen and - beta / 4 for the rejected, by hand."""
    velocity = off_by(0.04, 0.09)
    current = one(velocity[LATENTS].clone().requires_grad_())
    output = make(beta=8.0).loss(point(), {CURRENT: current, REFERENCE: velocity})
    assert float(output.loss) == pytest.approx(math.log(2))
    output.loss.backward()
    # errors are squares: their derivative is 2 x 0.2 and 2 x 0.3
    assert current[LATENTS].grad.flatten().tolist() == pytest.approx([2 * 2 * 0.2, -2 * 2 * 0.3], rel=1e-5)


def test_pairs_are_summed_by_weight_and_one_of_weight_zero_may_be_nan():
    current, reference = off_by(0.01, math.nan, 0.02, 0.5), off_by(0.012, 0.1, 0.019, 0.5)
    output = make().loss(point((0.25, 0.0)), {CURRENT: current, REFERENCE: reference})
    assert float(output.loss) == pytest.approx(0.25 * 0.620957, abs=1e-6)


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(3, 5, 2, generator=generator)  # noqa: E731
    pairs = Pairs(
        identity=[SampleIdentity(0, 4, str(i), 0) for i in range(3)],
        group=torch.arange(3),
        conditions=[{"embeds": torch.full((1,), float(i))} for i in range(3)],
        chosen=one(draw()),
        rejected=one(draw()),
    )
    return Batch(pairs, torch.ones(3), torch.full((3,), 1 / 3))


def test_the_two_of_a_pair_share_noise_and_timestep(batch):
    (made,) = make().training_points(batch, schedules={})
    sigma = made.timesteps[LATENTS] / 1000
    assert torch.equal(sigma[:3], sigma[3:]) and len(set(sigma.tolist())) == 3
    assert bool(((sigma > 0) & (sigma < 1)).all())
    both = torch.cat([batch.units.chosen[LATENTS], batch.units.rejected[LATENTS]])
    noise = made.target[LATENTS] + both  # the target is eps - x0
    torch.testing.assert_close(noise[:3], noise[3:])
    s = sigma[:, None, None]
    torch.testing.assert_close(made.latents[LATENTS], (1 - s) * both + s * noise)
    assert made.conditions["embeds"].flatten().tolist() == [0, 1, 2, 0, 1, 2]
    assert made.negative is None and made.weights.tolist() == pytest.approx([1 / 3] * 3)


def test_draws_are_a_pairs_own(batch):
    (together,) = make().training_points(batch, {})
    (alone,) = make().training_points(batch[[2]], {})
    assert torch.equal(together.latents[LATENTS][[2, 5]], alone.latents[LATENTS])
    later = replace(batch.units, identity=[replace(who, step=5) for who in batch.units.identity])
    (other,) = make().training_points(replace(batch, units=later), {})
    assert not torch.equal(other.timesteps[LATENTS], together.timesteps[LATENTS])


def test_what_it_needs():
    algorithm = make()
    assert (algorithm.source, algorithm.needs) == (PREFERENCES, PAIRS)
    assert algorithm.policies == (CURRENT, REFERENCE) and algorithm.units_per_prompt == 1
    assert algorithm.window(0) is None and list(algorithm.after_step(0)) == []


def test_settings_check_themselves():
    with pytest.raises(ConfigError, match="^algorithm.beta=0 must be greater than 0"):
        DPOConfig(beta=0)
