"""DiffusionNFT (arXiv 2509.16117): learning on the forward process, from good and bad samples at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional, cast

import torch
from torch import Tensor

from omnirl_hpc.algorithms.advantages import STANDARD_DEVIATIONS, advantages
from omnirl_hpc.algorithms.algorithm import (
    CLEAN,
    Algorithm,
    LossOutput,
    TrainingPoint,
    weighted_sum,
    with_reference,
)
from omnirl_hpc.algorithms.forward_process import (
    clean_estimate,
    mean_absolute,
    mean_square,
    noised,
    training_noise,
)
from omnirl_hpc.algorithms.units import Batch
from omnirl_hpc.config.schema import AlgorithmConfig, Config
from omnirl_hpc.errors import one_of, require
from omnirl_hpc.policies import CURRENT, OLD, REFERENCE, Blend
from omnirl_hpc.sampling.noise import TRAINING_TIMESTEP, permutation
from omnirl_hpc.sampling.samples import Samples, stack_conditions
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import Streams, map_streams

SMALLEST_ERROR = 1e-5  # of a clean estimate, where the loss is divided by it

# decay of the old policy after step n = min(rate x max(n - wait, 0), limit): the three of the authors' code
DECAYS = {"copy": (0, 0.0, 0.0), "linear": (0, 0.001, 0.5), "delayed": (75, 0.0075, 0.999)}


@dataclass
class DiffusionNFTConfig(AlgorithmConfig):
    """Defaults are those of the authors' code."""

    name: str = "diffusion_nft"
    beta: float = 1.0  # how far the two implicit policies are from the old one; 0.1 for several rewards
    advantage_clip: float = 5.0  # an advantage of this size and more counts as wholly good
    advantage_std: Optional[str] = "batch"  # batch | group | null: what advantages are divided by
    kl_coef: float = 1e-4  # of the squared distance of velocities to the reference (adapters off)
    timestep_fraction: float = 1.0  # of the sampler's timesteps that a sample is trained at
    old_decay: str = "linear"  # of the policy that samples: copy | linear | delayed
    old_every: int = 1  # steps between its moves
    # paper: the loss of the paper | code: times advantage_clip / beta, as in the authors' code
    loss_scale: str = "paper"

    def __post_init__(self) -> None:
        for key in ("beta", "advantage_clip", "old_every"):
            value = getattr(self, key)
            require(value > 0, f"algorithm.{key}={value} must be greater than 0")
        require(self.kl_coef >= 0, f"algorithm.kl_coef={self.kl_coef} must not be negative")
        fraction = self.timestep_fraction
        require(0 < fraction <= 1, f"algorithm.timestep_fraction={fraction} must be above 0 and at most 1")
        one_of("algorithm.advantage_std", self.advantage_std, STANDARD_DEVIATIONS)
        one_of("algorithm.old_decay", self.old_decay, tuple(DECAYS))
        one_of("algorithm.loss_scale", self.loss_scale, ("paper", "code"))


@dataclass(frozen=True, kw_only=True)
class NoisedPoint(TrainingPoint):
    """Samples noised to one level each."""

    goodness: Tensor  # [B] fp32 in [0, 1], the probability that a sample is a good one
    clean: Streams  # [B, …] fp32, x0
    sigmas: Streams  # [B] fp32


class DiffusionNFT(Algorithm):
    """With r the goodness of a sample and, from the velocities of the current and the old policy,

        v+ = (1 - beta) v_old + beta v,  v- = (1 + beta) v_old - beta v,  x0± = x_sigma - sigma v±
        loss = mean r |x0+ - x0|^2 / w+ + (1 - r) |x0- - x0|^2 / w- + kl_coef |v - v_ref|^2

    where w± is the mean of |x0± - x0|, a constant to the gradient, and norms are means over latent elements.
    The old policy samples, without guidance and by ODE steps, and follows the current one. r is 1/2 + A / (2
    advantage_clip), the paper's with Z = advantage_clip times the standard deviation.
    """

    Settings = DiffusionNFTConfig
    settings: DiffusionNFTConfig
    needs = CLEAN
    sampler = OLD

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        scale = config.sampling.true_cfg_scale
        require(
            scale == 1,
            f"sampling.true_cfg_scale={scale}: algorithm.name=diffusion_nft learns what is sampled without "
            "guidance: set it to 1",
        )
        self.policies = with_reference((CURRENT, OLD), self.settings.kl_coef)

    @property
    def points_per_unit(self) -> int:
        return max(1, int(self.config.sampling.num_inference_steps * self.settings.timestep_fraction))

    def advantages(self, rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
        clip = self.settings.advantage_clip
        return advantages(rewards, groups, std=self.settings.advantage_std, mask=mask).clamp(-clip, clip)

    def training_points(self, batch: Batch, schedules: Mapping[str, Schedule]) -> Iterator[NoisedPoint]:
        """At some of the sampler's timesteps, in an order of each sample's own, with fresh noise at each."""
        samples, device = cast(Samples, batch.units), batch.weights.device
        num_steps = next(iter(schedules.values())).num_steps
        orders = [permutation(num_steps, *who.address(TRAINING_TIMESTEP)) for who in samples.identity]
        conditions = stack_conditions(samples.conditions)
        for k in range(self.points_per_unit):
            steps = torch.tensor([order[k] for order in orders])
            sigmas = {name: schedule.sigmas[steps].to(device) for name, schedule in schedules.items()}
            yield NoisedPoint(
                latents=noised(samples.clean, training_noise(samples.identity, samples.clean, k), sigmas),
                timesteps={name: s.timesteps[steps].to(device) for name, s in schedules.items()},
                conditions=conditions,
                negative=None,
                weights=batch.weights / self.points_per_unit,
                goodness=(batch.advantages / (2 * self.settings.advantage_clip) + 0.5).clamp(0, 1),
                clean=samples.clean,
                sigmas=sigmas,
            )

    def loss(self, point: NoisedPoint, velocities: Mapping[str, Streams]) -> LossOutput:
        beta = self.settings.beta
        current = map_streams(Tensor.float, velocities[CURRENT])
        old = map_streams(lambda v: v.detach().float(), velocities[OLD])
        positive = map_streams(lambda v, v_old: (1 - beta) * v_old + beta * v, current, old)
        negative = map_streams(lambda v, v_old: (1 + beta) * v_old - beta * v, current, old)
        error_positive, error_negative = _error(point, positive), _error(point, negative)
        error = point.goodness * error_positive + (1 - point.goodness) * error_negative
        if self.settings.loss_scale == "code":
            error = error * self.settings.advantage_clip / beta
        loss = weighted_sum(error, point.weights)
        means = {
            "goodness": point.goodness,
            "error/positive": error_positive,
            "error/negative": error_negative,
            "distance/old": mean_square(current, old),
        }
        if REFERENCE in velocities:
            distance = mean_square(current, map_streams(lambda v: v.detach().float(), velocities[REFERENCE]))
            loss = loss + self.settings.kl_coef * weighted_sum(distance, point.weights)
            means["distance/reference"] = distance
        return LossOutput(loss, {name: values.detach() for name, values in means.items()}, {})

    def after_step(self, step: int) -> Sequence[Blend]:
        if (step + 1) % self.settings.old_every:
            return ()
        return (Blend(OLD, old_decay(self.settings.old_decay, step)),)


def old_decay(kind: str, step: int) -> float:
    """The decay of the old policy after step `step` (0, 1, …)."""
    wait, rate, limit = DECAYS[kind]
    return min(rate * max(step - wait, 0), limit)


def _error(point: NoisedPoint, velocity: Streams) -> Tensor:
    """[B] |x0' - x0|^2 / w of the clean estimate x0' that a velocity gives."""
    estimate = clean_estimate(point.latents, velocity, point.sigmas)
    size = mean_absolute(map_streams(Tensor.detach, estimate), point.clean).clamp(min=SMALLEST_ERROR)
    return mean_square(estimate, point.clean) / size
