"""The weights of TempFlow-GRPO by hand, and that they are those of the policy loss alone."""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.algorithms.tempflow_grpo import TempFlowGRPOConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.policies import CURRENT, REFERENCE
from tests.algorithms.cases import SCHEDULES, make, units, velocity

# Of the sde with noise level .7 on the sigmas 1, .9, .75, .5, .2: .7 sqrt(sigma / (1 - sigma)) sqrt(-dt),
# where the denominator is that of .9 at sigma = 1: .7 sqrt(10 x .1), .7 sqrt(9 x .15), .7 sqrt(3 x .25), .7
# sqrt(.3)
NOISE = [0.7, 0.813327, 0.606218, 0.383406]
THETA = torch.tensor([0.5, -0.3, 0.7])


@pytest.mark.parametrize("scale", [None, 1.53])
def test_advantages_are_weighted_by_the_noise_of_their_step(scale):
    algorithm = make("tempflow_grpo", weight_scale=scale)
    batch = units(algorithm)
    factor = scale or 4 / sum(NOISE)
    for i, point in enumerate(algorithm.training_points(batch, SCHEDULES)):
        # samples start at step 0 and 1 in turn
        expected = [a * factor * NOISE[b % 2 + i] for b, a in enumerate(batch.advantages.tolist())]
        assert point.advantages.tolist() == pytest.approx(expected, rel=1e-5)
        assert point.weights.tolist() == pytest.approx((batch.weights / 3).tolist())


def test_without_a_scale_the_weights_have_a_mean_of_one():
    """Whatever the noise level: the sum over all steps that a window may hold."""
    for kind, level in (("sde", 0.3), ("sde", 1.2), ("cps", 0.8), ("dance", 0.3)):
        algorithm = make("tempflow_grpo", kind, level)
        batch = units(algorithm)
        batch.advantages = torch.ones(6)
        seen = [point.advantages for point in algorithm.training_points(batch, SCHEDULES)]
        first, second = torch.stack(seen)[:, 0], torch.stack(seen)[:, 1]  # steps 0, 1, 2 and 1, 2, 3
        assert float(first.sum() + second[-1]) == pytest.approx(4, rel=1e-5)


def test_the_kl_term_is_not_weighted():
    plain, weighted = make("flow_grpo", kl_coef=0.1), make("tempflow_grpo", kl_coef=0.1, weight_scale=5.0)
    batch = units(plain)
    batch.advantages = torch.zeros(6)
    losses = [
        [
            float(
                algorithm.loss(
                    point, {CURRENT: velocity(point, THETA), REFERENCE: velocity(point, 2 * THETA)}
                ).loss
            )
            for point in algorithm.training_points(batch, SCHEDULES)
        ]
        for algorithm in (plain, weighted)
    ]
    assert losses[0] == losses[1] and losses[0][0] > 0


def test_settings_check_themselves():
    with pytest.raises(ConfigError, match="algorithm.weight_scale=-1 must be greater than 0, or null"):
        TempFlowGRPOConfig(weight_scale=-1)
