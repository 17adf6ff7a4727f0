"""Flow-GRPO (arXiv 2505.05470): GRPO on the stochastic denoising steps of a flow-matching model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Optional, cast

from torch import Tensor

from omnirl_hpc.algorithms.advantages import STANDARD_DEVIATIONS, advantages
from omnirl_hpc.algorithms.algorithm import (
    LikelihoodAlgorithm,
    LikelihoodPoint,
    LossOutput,
    weighted_sum,
    with_reference,
)
from omnirl_hpc.algorithms.surrogate import clipped_surrogate
from omnirl_hpc.algorithms.units import Batch
from omnirl_hpc.config.schema import AlgorithmConfig, Config
from omnirl_hpc.errors import one_of, require
from omnirl_hpc.policies import CURRENT, REFERENCE
from omnirl_hpc.sampling.samples import Samples, Trajectory, stack_conditions
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import Streams, map_streams, mean_over_streams
from omnirl_hpc.sampling.transitions import Transition, transition
from omnirl_hpc.sampling.windows import window_size


@dataclass
class FlowGRPOConfig(AlgorithmConfig):
    """PPO clipping of the likelihood ratio of stochastic denoising steps."""

    name: str = "flow_grpo"
    clip_range: float = (
        1e-5  # of the ratio; the log-probability is a mean over latent dimensions, hence so small
    )
    advantage_clip: float = 5.0
    advantage_std: Optional[str] = "batch"  # batch | group | null: what advantages are divided by
    kl_coef: float = 0.0  # of the KL divergence to the reference (adapters off)
    old_log_prob: str = "recompute"  # recompute by the actor | rollout: the engine's are trusted

    def __post_init__(self) -> None:
        require(self.clip_range > 0, f"algorithm.clip_range={self.clip_range} must be greater than 0")
        require(
            self.advantage_clip > 0, f"algorithm.advantage_clip={self.advantage_clip} must be greater than 0"
        )
        require(self.kl_coef >= 0, f"algorithm.kl_coef={self.kl_coef} must not be negative")
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


class FlowGRPO(LikelihoodAlgorithm[TransitionPoint]):
    """PPO clipping of rho = exp(log p - log p_old), and optionally a KL divergence to the reference:

    loss = mean max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) + beta mean (mu - mu_ref)^2 / (2 std^2)

    where std is that of the whole transition, step size included (in the paper's notation sigma_t sqrt(dt)),
    so the second term is the exact KL divergence of two Gaussians per latent dimension.
    """

    Settings = FlowGRPOConfig
    settings: FlowGRPOConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.policies = with_reference((CURRENT,), self.settings.kl_coef)
        self.recomputes_old_log_prob = self.settings.old_log_prob == "recompute"
        if not self.recomputes_old_log_prob:
            self.tolerated_gap = self.settings.clip_range

    @property
    def points_per_unit(self) -> int:
        return window_size(self.config.sampling)

    def advantages(self, rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
        clip = self.settings.advantage_clip
        return advantages(rewards, groups, std=self.settings.advantage_std, mask=mask).clamp(-clip, clip)

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
        return _log_prob(point, self._transitions(point, velocity))

    def loss(self, point: TransitionPoint, velocities: Mapping[str, Streams]) -> LossOutput:
        current = self._transitions(point, velocities[CURRENT])
        clip = self.settings.clip_range
        surrogate = clipped_surrogate(
            _log_prob(point, current) - point.old_log_prob, point.advantages, point.weights > 0, clip, clip
        )
        loss = weighted_sum(surrogate.loss, point.weights)
        means = {"ratio/mean": surrogate.ratio, "clip_fraction": surrogate.clipped, "kl": surrogate.kl}
        if REFERENCE in velocities:
            reference = self._transitions(point, velocities[REFERENCE])
            divergences = {
                name: gaussian_kl(step.mean, reference[name].mean.detach(), step.std)
                for name, step in current.items()
            }
            divergence = mean_over_streams(divergences, point.latents)
            loss = loss + self.settings.kl_coef * weighted_sum(divergence, point.weights)
            means["kl_reference"] = divergence.detach()
        return LossOutput(loss, means, {"ratio/max_abs_log": surrogate.log_ratio.abs().max()})

    def _transitions(self, point: TransitionPoint, velocity: Streams) -> dict[str, Transition]:
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


def _log_prob(point: TransitionPoint, steps: dict[str, Transition]) -> Tensor:
    log_probs = {name: cast(Tensor, step.log_prob) for name, step in steps.items()}  # no ODE step among them
    return mean_over_streams(log_probs, point.latents)


def gaussian_kl(mean: Tensor, other_mean: Tensor, std: Tensor) -> Tensor:
    """[B] KL divergence of N(mean, std^2) and N(other_mean, std^2), the mean over latent dimensions."""
    return ((mean - other_mean) ** 2 / (2 * std**2)).flatten(1).mean(dim=1)
