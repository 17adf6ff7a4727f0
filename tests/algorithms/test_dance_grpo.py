"""Which steps of a trajectory DanceGRPO trains, and in which order."""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.algorithms.dance_grpo import DanceGRPOConfig
from omnirl_hpc.errors import ConfigError
from tests.algorithms.cases import COUNT, SCHEDULES, loss_and_gradient, make, units

THETA = torch.tensor([0.5, -0.3, 0.7])


def test_a_fraction_of_the_steps_in_an_order_of_each_samples_own():
    algorithm = make("dance_grpo", timestep_fraction=0.7)
    assert algorithm.points_per_unit == 2  # of 3
    batch = units(algorithm)
    made = batch.units.trajectory
    points = list(algorithm.training_points(batch, SCHEDULES))
    assert len(points) == 2
    taken = []
    for b in range(COUNT):
        places = []
        for point in points:
            # its place in the window is where its latents are; all else must be of the same place
            (place,) = [
                i for i in range(3) if torch.equal(made.latents["video"][b, i], point.latents["video"][b])
            ]
            places.append(place)
            assert torch.equal(point.latents["audio"][b], made.latents["audio"][b, place])
            assert torch.equal(point.next_latents["video"][b], made.latents["video"][b, place + 1])
            assert point.sigma["audio"][b] == made.sigmas["audio"][b, place]
            assert point.sigma_next["audio"][b] == made.sigmas["audio"][b, place + 1]
            assert point.timesteps["video"][b] == made.timesteps["video"][b, place]
            assert point.rollout_log_prob[b] == point.old_log_prob[b] == made.log_probs[b, place]
        taken.append(tuple(places))
        assert len(set(places)) == 2
    assert len(set(taken)) > 1
    assert sum(float(point.weights.sum()) for point in points) == pytest.approx(1.0)


def test_all_steps_are_flow_grpos():
    """In whatever order."""
    batch = units(make("flow_grpo"))
    whole, plain = (
        make("dance_grpo", timestep_fraction=1.0, clip_range=0.1),
        make("flow_grpo", clip_range=0.1),
    )
    ours, theirs = (loss_and_gradient(a, [batch], THETA, 0.9 * THETA) for a in (whole, plain))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    assert ours[1].tolist() == pytest.approx(theirs[1].tolist(), rel=1e-5)


def test_a_small_fraction_is_one_step():
    assert make("dance_grpo", timestep_fraction=0.01).points_per_unit == 1


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_settings_check_themselves(fraction):
    with pytest.raises(ConfigError, match=f"algorithm.timestep_fraction={fraction} must be above 0"):
        DanceGRPOConfig(timestep_fraction=fraction)
