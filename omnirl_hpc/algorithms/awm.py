"""AWM (arXiv 2509.25050), advantage-weighted matching: a policy gradient on the loss of pretraining."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional, cast

import torch
from torch import Tensor

from omnirl_hpc.algorithms.advantages import STANDARD_DEVIATIONS, advantages
from omnirl_hpc.algorithms.algorithm import (
    CLEAN,
    LikelihoodAlgorithm,
    LikelihoodPoint,
    LossOutput,
    weighted_sum,
    with_reference,
)
from omnirl_hpc.algorithms.forward_process import mean_square, noised, training_noise
from omnirl_hpc.algorithms.surrogate import clipped_surrogate
from omnirl_hpc.algorithms.units import Batch
from omnirl_hpc.config.schema import AlgorithmConfig, Config
from omnirl_hpc.errors import one_of, require
from omnirl_hpc.policies import CURRENT, OLD, REFERENCE, Blend
from omnirl_hpc.sampling.noise import TRAINING_TIMESTEP, uniform_integer
from omnirl_hpc.sampling.samples import Samples, stack_conditions
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import Streams, map_streams

WEIGHTINGS = ("uniform", "t", "t2", "huber", "ghuber")
HUBER_POWER = 0.5
SMALLEST_ERROR = 1e-10  # added before a root is taken, whose slope at 0 is infinite

OLD_DECAY_RATE = 0.001  # a step, of the policy that is kept near, until its limit


@dataclass
class AWMConfig(AlgorithmConfig):
    """Defaults are those of the authors' code for Stable Diffusion 3.5 (GenEval and OCR)."""

    name: str = "awm"
    # of an error at noise level t in the likelihood: uniform | t | t2 | huber (t x its root) | ghuber
    weighting: str = "ghuber"
    ghuber_power: float = 0.25  # the root that ghuber takes of the mean squared error
    clip_range: float = 1.0  # of the ratio; 1 hardly ever clips, as the authors have it
    advantage_clip: float = 5.0  # an advantage of this size and more counts as 1
    advantage_std: Optional[str] = "batch"  # batch | group | null: what advantages are divided by
    kl_coef: float = 3e-3  # of the squared distance of velocities to the reference (adapters off)
    old_coef: float = 1.0  # of the same to a policy that follows the current one; 0: there is none
    old_decay: float = 0.3  # of that policy after step n: min(0.001 n, old_decay)
    points_per_sample: int = 6  # timesteps that a sample is trained at
    timestep_fraction: float = 0.9  # of the sampler's timesteps, the noisiest first, that these are among
    skip_first: bool = True  # never train at the first timestep, which is noise alone

    def __post_init__(self) -> None:
        for key in ("clip_range", "advantage_clip", "points_per_sample"):
            value = getattr(self, key)
            require(value > 0, f"algorithm.{key}={value} must be greater than 0")
        for key in ("kl_coef", "old_coef"):
            value = getattr(self, key)
            require(value >= 0, f"algorithm.{key}={value} must not be negative")
        for key in ("ghuber_power", "timestep_fraction"):
            value = getattr(self, key)
            require(0 < value <= 1, f"algorithm.{key}={value} must be above 0 and at most 1")
        require(
            0 <= self.old_decay < 1, f"algorithm.old_decay={self.old_decay} must be at least 0 and below 1"
        )
        one_of("algorithm.weighting", self.weighting, WEIGHTINGS)
        one_of("algorithm.advantage_std", self.advantage_std, STANDARD_DEVIATIONS)


@dataclass(frozen=True, kw_only=True)
class MatchingPoint(LikelihoodPoint):
    """Samples noised to one level each."""

    advantages: Tensor  # [B] fp32 in [-1, 1]
    target: Streams  # [B, …] fp32, the velocity eps - x0 that leads from a sample to its noise
    levels: Tensor  # [B] fp32, t: the noise level of the first stream


class AWM(LikelihoodAlgorithm[MatchingPoint]):
    """With log p = - w(t, |v - (eps - x0)|^2), which the old policy had before the step's first update,

        loss = mean max(-A rho, -A clip(rho, 1 - eps, 1 + eps)), rho = exp(log p - log p_old)
             + kl_coef |v - v_ref|^2 + old_coef |v - v_old|^2

    where norms are means over latent elements. At the first update rho is 1, and the gradient is that of A
    times the flow-matching loss, the paper's. w(t, e) is e, t e, t^2 e, t sqrt(e) or, ghuber, t e^p / p; the
    ratio, the two distances and ghuber are the authors' code's. Samples are made by ODE steps; with guidance,
    the guided velocity is what is trained.
    """

    Settings = AWMConfig
    settings: AWMConfig
    needs = CLEAN
    engine_scores = False
    trains_with_guidance = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        near = (CURRENT, OLD) if self.settings.old_coef > 0 else (CURRENT,)
        self.policies = with_reference(near, self.settings.kl_coef)
        first, last = self._steps(config.sampling.num_inference_steps)
        points = self.settings.points_per_sample
        require(
            points <= last - first,
            f"algorithm.points_per_sample={points} is more than the {last - first} timesteps that "
            "algorithm.timestep_fraction and algorithm.skip_first leave of "
            f"sampling.num_inference_steps={config.sampling.num_inference_steps}",
        )

    @property
    def points_per_unit(self) -> int:
        return self.settings.points_per_sample

    def advantages(self, rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
        clip = self.settings.advantage_clip
        return (
            advantages(rewards, groups, std=self.settings.advantage_std, mask=mask).clamp(-clip, clip) / clip
        )

    def training_points(self, batch: Batch, schedules: Mapping[str, Schedule]) -> Iterator[MatchingPoint]:
        """One timestep of each of `points_per_sample` parts of the sampler's, with fresh noise at each."""
        samples, device = cast(Samples, batch.units), batch.weights.device
        bounds = strata(*self._steps(next(iter(schedules.values())).num_steps), self.points_per_unit)
        conditions = stack_conditions(samples.conditions)
        negative = None if samples.negative is None else stack_conditions(samples.negative)
        for k, (low, high) in enumerate(bounds):
            steps = torch.tensor(
                [uniform_integer(low, high, *who.address(TRAINING_TIMESTEP, k)) for who in samples.identity]
            )
            sigmas = {name: schedule.sigmas[steps].to(device) for name, schedule in schedules.items()}
            noise = training_noise(samples.identity, samples.clean, k)
            yield MatchingPoint(
                latents=noised(samples.clean, noise, sigmas),
                timesteps={name: s.timesteps[steps].to(device) for name, s in schedules.items()},
                conditions=conditions,
                negative=negative,
                weights=batch.weights / self.points_per_unit,
                advantages=batch.advantages,
                target=map_streams(torch.sub, noise, samples.clean),
                levels=next(iter(sigmas.values())),
                rollout_log_prob=torch.zeros_like(batch.weights),
                old_log_prob=torch.zeros_like(batch.weights),
            )

    def log_prob(self, point: MatchingPoint, velocity: Streams) -> Tensor:
        error = mean_square(map_streams(Tensor.float, velocity), point.target)
        return -weighted_error(error, point.levels, self.settings.weighting, self.settings.ghuber_power)

    def loss(self, point: MatchingPoint, velocities: Mapping[str, Streams]) -> LossOutput:
        clip = self.settings.clip_range
        log_ratio = self.log_prob(point, velocities[CURRENT]) - point.old_log_prob
        surrogate = clipped_surrogate(log_ratio, point.advantages, point.weights > 0, clip, clip)
        loss = weighted_sum(surrogate.loss, point.weights)
        means = {"ratio/mean": surrogate.ratio, "clip_fraction": surrogate.clipped}
        current = map_streams(Tensor.float, velocities[CURRENT])
        for policy, coefficient in ((REFERENCE, self.settings.kl_coef), (OLD, self.settings.old_coef)):
            if policy in velocities:
                other = map_streams(lambda v: v.detach().float(), velocities[policy])
                distance = mean_square(current, other)
                loss = loss + coefficient * weighted_sum(distance, point.weights)
                means[f"distance/{policy}"] = distance.detach()
        return LossOutput(loss, means, {"ratio/max_abs_log": surrogate.log_ratio.abs().max()})

    def after_step(self, step: int) -> Sequence[Blend]:
        if OLD not in self.policies:
            return ()
        return (Blend(OLD, min(OLD_DECAY_RATE * step, self.settings.old_decay)),)

    def _steps(self, num_steps: int) -> tuple[int, int]:
        """The first timestep of the sampler that is trained, and the one after the last."""
        return int(self.settings.skip_first), int(num_steps * self.settings.timestep_fraction)


def strata(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """The steps first … last - 1 as `parts` ranges [low, high), whose sizes differ by at most one."""
    bounds = [first + (last - first) * k // parts for k in range(parts + 1)]
    return list(zip(bounds, bounds[1:]))


def weighted_error(error: Tensor, levels: Tensor, weighting: str, power: float) -> Tensor:
    """[B] what an error [B] at noise levels [B] costs: 0 where the error is 0."""
    if weighting == "uniform":
        return error
    if weighting == "t":
        return levels * error
    if weighting == "t2":
        return levels**2 * error
    p = HUBER_POWER if weighting == "huber" else power
    root = (error + SMALLEST_ERROR) ** p - SMALLEST_ERROR**p
    return levels * root if weighting == "huber" else levels * root / p
