"""What algorithms on the stochastic steps of a trajectory share: their settings, points, likelihoods, and the
divergence from the reference. Each of them adds what it makes of a step's likelihood ratio.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Optional, cast

from torch import Tensor

from omnirl_hpc.algorithms.advantages import STANDARD_DEVIATIONS, advantages
from omnirl_hpc.algorithms.algorithm import (
    LikelihoodAlgorithm,
    LikelihoodPoint,
    LossOutput,
    weighted_sum,
    with_reference,
)
from omnirl_hpc.algorithms.scale import LogRatioScale, StepScale, ratio_scale, remark_on_range, step_scales
from omnirl_hpc.algorithms.units import Batch
from omnirl_hpc.config.schema import AlgorithmConfig, Config
from omnirl_hpc.errors import one_of, require
from omnirl_hpc.policies import CURRENT, REFERENCE
from omnirl_hpc.sampling.samples import Samples, Trajectory, stack_conditions
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import Streams, map_streams, mean_over_streams
from omnirl_hpc.sampling.transitions import Transition, transition
from omnirl_hpc.sampling.windows import trained_steps, window_size


@dataclass
class TrajectoryConfig(AlgorithmConfig):
    """What algorithms on trajectories have in common."""

    advantage_clip: float = 5.0
    advantage_std: Optional[str] = "batch"  # batch | group | null: what advantages are divided by
    leave_one_out: bool = False  # a sample is compared with the mean of the others, not of all, of its group
    kl_coef: float = 0.0  # of the KL divergence to the reference (adapters off)
    # paper: the exact divergence of the transitions | code: that of the code of flow_grpo and verl-omni,
    # whose variance of an sde step leaves the step size out: 1 / |dt| times smaller
    kl_scale: str = "paper"
    old_log_prob: str = "recompute"  # recompute by the actor | rollout: the engine's are trusted

    def __post_init__(self) -> None:
        require(
            self.advantage_clip > 0, f"algorithm.advantage_clip={self.advantage_clip} must be greater than 0"
        )
        require(self.kl_coef >= 0, f"algorithm.kl_coef={self.kl_coef} must not be negative")
        one_of("algorithm.kl_scale", self.kl_scale, ("paper", "code"))
        one_of("algorithm.old_log_prob", self.old_log_prob, ("recompute", "rollout"))
        one_of("algorithm.advantage_std", self.advantage_std, STANDARD_DEVIATIONS)


@dataclass(frozen=True, kw_only=True)
class TransitionPoint(LikelihoodPoint):
    """One stochastic step."""

    advantages: Tensor  # [B] fp32
    next_latents: Streams  # [B, …] fp32, what the step drew
    sigma: Streams  # [B] fp32, before and after the step
    sigma_next: Streams
    sigma_max: Streams  # [B] fp32, the schedule's second sigma


@dataclass(frozen=True)
class PolicyLoss:
    """What an algorithm makes of the likelihood ratio of one step."""

    values: Tensor  # [B], before weights
    means: dict[str, Tensor]  # as in LossOutput
    maxima: dict[str, Tensor]


class TrajectoryAlgorithm(LikelihoodAlgorithm[TransitionPoint]):
    """loss = mean policy_loss + kl_coef mean (mu - mu_ref)^2 / (2 std^2)

    where std is that of the whole transition, step size included (in the notation of Flow-GRPO's paper
    sigma_t sqrt(dt)), so that the second term is the exact KL divergence of two Gaussians per latent
    dimension.
    """

    Settings = TrajectoryConfig
    settings: TrajectoryConfig
    range_key: ClassVar[str] = "clip_range"  # the setting that limits how far the policy moves

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.policies = with_reference((CURRENT,), self.settings.kl_coef)
        self.recomputes_old = self.settings.old_log_prob == "recompute"

    @abstractmethod
    def policy_loss(self, point: TransitionPoint, steps: Mapping[str, Transition]) -> PolicyLoss:
        """Of the current policy's transition of each stream."""

    @property
    def points_per_unit(self) -> int:
        return window_size(self.config.sampling)

    def advantages(self, rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
        clip = self.settings.advantage_clip
        return advantages(
            rewards,
            groups,
            std=self.settings.advantage_std,
            mask=mask,
            leave_one_out=self.settings.leave_one_out,
        ).clamp(-clip, clip)

    def remarks(
        self, schedules: Mapping[str, Schedule], shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[str]:
        yield from self._remarks_on_range(schedules, shapes)
        if not self._kl_coef_may_be_ported:
            return
        steps = trained_steps(self.config.sampling)
        sizes = [
            float(schedule.sigmas[i] - schedule.sigmas[i + 1])
            for schedule in schedules.values()
            for i in steps
        ]
        yield (
            f"algorithm.kl_coef={self.settings.kl_coef} is a factor of the exact divergence, as in the paper "
            "of Flow-GRPO; the code of flow_grpo and verl-omni leaves the step size out, so a value from "
            f"there acts {1 / max(sizes):.3g} to {1 / min(sizes):.3g} times as strongly on this schedule: "
            "set algorithm.kl_scale=code for such a value"
        )

    def _remarks_on_range(
        self, schedules: Mapping[str, Schedule], shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[str]:
        sampling = self.config.sampling
        scales = step_scales(
            sampling.transition, sampling.noise_level, schedules, shapes, trained_steps(sampling)
        )
        values = sum(math.prod(shape) for shape in shapes.values())
        what = (
            f"sampling.transition={sampling.transition}, noise level {sampling.noise_level}, and {values} "
            "latent values"
        )
        value = getattr(self.settings, self.range_key)
        remark = remark_on_range(
            f"algorithm.{self.range_key}", value, [self.ratio_scale(streams) for streams in scales], what
        )
        if remark is not None:
            yield remark

    def ratio_scale(self, streams: Sequence[StepScale]) -> LogRatioScale:
        """How large what the setting `range_key` limits is at one step, given its streams."""
        return ratio_scale(self.config.sampling.transition, streams)

    @property
    def _kl_coef_may_be_ported(self) -> bool:
        """Whether a kl_coef means something else in other projects."""
        settings = self.settings
        return (
            settings.kl_coef > 0 and settings.kl_scale == "paper" and self.config.sampling.transition == "sde"
        )

    def training_points(self, batch: Batch, schedules: Mapping[str, Schedule]) -> Iterator[TransitionPoint]:
        samples = cast(Samples, batch.units)
        made = cast(Trajectory, samples.trajectory)
        steps = made.log_probs.shape[1]
        conditions = stack_conditions(samples.conditions)
        negative = None if samples.negative is None else stack_conditions(samples.negative)
        for i in range(steps):
            yield TransitionPoint(
                latents=_at(made.latents, i),
                timesteps=_at(made.timesteps, i),
                conditions=conditions,
                negative=negative,
                weights=batch.weights / steps,
                advantages=batch.advantages,
                next_latents=_at(made.latents, i + 1),
                sigma=_at(made.sigmas, i),
                sigma_next=_at(made.sigmas, i + 1),
                sigma_max=made.sigma_max,
                rollout_log_prob=made.log_probs[:, i],
                old_log_prob=made.log_probs[:, i],
            )

    def log_prob(self, point: TransitionPoint, velocity: Streams) -> Tensor:
        return step_log_prob(point, self.transitions(point, velocity))

    def loss(self, point: TransitionPoint, velocities: Mapping[str, Streams]) -> LossOutput:
        current = self.transitions(point, velocities[CURRENT])
        policy = self.policy_loss(point, current)
        loss, means = weighted_sum(policy.values, point.weights), dict(policy.means)
        if REFERENCE in velocities:
            reference = self.transitions(point, velocities[REFERENCE])
            means_of_reference = map_streams(Tensor.detach, step_means(reference))
            without_dt = self.settings.kl_scale == "code" and self.config.sampling.transition == "sde"
            divergence = divergence_per_element(point, current, means_of_reference, without_dt)
            loss = loss + self.settings.kl_coef * weighted_sum(divergence, point.weights)
            means["kl_reference"] = divergence.detach()
        return LossOutput(loss, means, policy.maxima)

    def transitions(self, point: TransitionPoint, velocity: Streams) -> dict[str, Transition]:
        """Of each stream."""
        return {
            name: transition(
                self.config.sampling.transition,
                velocity[name],
                latents,
                point.sigma[name],
                point.sigma_next[name],
                noise_level=self.config.sampling.noise_level,
                sigma_max=point.sigma_max[name],
                next_sample=point.next_latents[name],
            )
            for name, latents in point.latents.items()
        }


def _at(streams: Streams, place: int) -> Streams:
    return map_streams(lambda tensor: tensor[:, place], streams)


def step_means(steps: Mapping[str, Transition]) -> Streams:
    """The mean of each stream's transition."""
    return {name: step.mean for name, step in steps.items()}


def step_log_prob(point: TransitionPoint, steps: Mapping[str, Transition]) -> Tensor:
    """[B], the mean over the elements of all streams."""
    log_probs = {name: cast(Tensor, step.log_prob) for name, step in steps.items()}  # no ODE step among them
    return mean_over_streams(log_probs, point.latents)


def divergence_per_element(
    point: TransitionPoint,
    steps: Mapping[str, Transition],
    other_means: Streams,
    without_dt: bool = False,
) -> Tensor:
    """[B] KL divergence of the transitions from those with other means, the mean over the elements of all
    streams. without_dt: times the step size, which is what leaving it out of an sde's variance amounts to.
    """
    divergences = {name: gaussian_kl(step.mean, other_means[name], step.std) for name, step in steps.items()}
    if without_dt:
        divergences = {
            name: divergence * (point.sigma[name] - point.sigma_next[name])
            for name, divergence in divergences.items()
        }
    return mean_over_streams(divergences, point.latents)


def gaussian_kl(mean: Tensor, other_mean: Tensor, std: Tensor) -> Tensor:
    """[B] KL divergence of N(mean, std^2) and N(other_mean, std^2), the mean over latent dimensions."""
    return ((mean - other_mean) ** 2 / (2 * std**2)).flatten(1).mean(dim=1)
