"""An algorithm from outside of the package, in one file: reward-weighted flow matching."""

from __future__ import annotations

from dataclasses import dataclass

from omnirl_hpc.algorithms.algorithm import CLEAN, Algorithm, LossOutput, TrainingPoint, weighted_sum
from omnirl_hpc.algorithms.forward_process import mean_square, noised, training_noise
from omnirl_hpc.config.schema import AlgorithmConfig
from omnirl_hpc.errors import require
from omnirl_hpc.policies import CURRENT, Blend
from omnirl_hpc.sampling.samples import stack_conditions
from omnirl_hpc.sampling.streams import Streams, map_streams

TEACHER = "teacher"


@dataclass
class RewardWeightedConfig(AlgorithmConfig):
    step: int = 1  # of the schedule, whose noise all samples get

    def __post_init__(self) -> None:
        require(self.step >= 0, f"algorithm.step={self.step} must not be negative")


@dataclass(frozen=True, kw_only=True)
class WeightedPoint(TrainingPoint):
    rewards: object  # [B] fp32, above the mean of their group
    target: Streams


class RewardWeighted(Algorithm[WeightedPoint]):
    """The flow-matching loss of each sample times its advantage, near a teacher that follows."""

    Settings = RewardWeightedConfig
    settings: RewardWeightedConfig
    needs = CLEAN
    policies = (CURRENT, TEACHER)
    points_per_unit = 1

    def advantages(self, rewards, groups, mask):
        return (rewards - rewards[mask].mean()).where(mask, 0).float()

    def training_points(self, batch, schedules):
        samples, step = batch.units, self.settings.step
        noise = training_noise(samples.identity, samples.clean, 0)
        whole = batch.weights * 0 + 1  # [B]
        sigmas = {name: whole * float(schedule.sigmas[step]) for name, schedule in schedules.items()}
        yield WeightedPoint(
            latents=noised(samples.clean, noise, sigmas),
            timesteps={name: whole * float(s.timesteps[step]) for name, s in schedules.items()},
            conditions=stack_conditions(samples.conditions),
            negative=None,
            weights=batch.weights,
            rewards=batch.advantages,
            target=map_streams(lambda eps, x0: eps - x0, noise, samples.clean),
        )

    def loss(self, point, velocities):
        error = mean_square(velocities[CURRENT], point.target)
        distance = mean_square(velocities[CURRENT], velocities[TEACHER])
        loss = weighted_sum(point.rewards * error + 0.1 * distance, point.weights)
        return LossOutput(loss, {"error": error.detach(), "distance": distance.detach()}, {})

    def after_step(self, step):
        return (Blend(TEACHER, decay=0.5),)
