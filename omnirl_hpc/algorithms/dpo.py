"""Diffusion-DPO (arXiv 2311.12908) on pairs of a table: learning without rollout or reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from omnirl_hpc.algorithms.algorithm import (
    PAIRS,
    PREFERENCES,
    Algorithm,
    LossOutput,
    TrainingPoint,
    weighted_sum,
)
from omnirl_hpc.algorithms.forward_process import mean_square, noised, training_noise
from omnirl_hpc.algorithms.units import Batch, Pairs
from omnirl_hpc.config.schema import AlgorithmConfig
from omnirl_hpc.errors import require
from omnirl_hpc.policies import CURRENT, REFERENCE
from omnirl_hpc.sampling.noise import TRAINING_TIMESTEP, standard_normal
from omnirl_hpc.sampling.samples import stack_conditions
from omnirl_hpc.sampling.schedule import NUM_TRAIN_TIMESTEPS, Schedule
from omnirl_hpc.sampling.streams import Streams, map_streams


@dataclass
class DPOConfig(AlgorithmConfig):
    """One loss, one temperature."""

    name: str = "dpo"
    beta: float = 2000.0  # the paper's for Stable Diffusion 1.5; verl-omni's recipes take 100

    def __post_init__(self) -> None:
        require(self.beta > 0, f"algorithm.beta={self.beta} must be greater than 0")


@dataclass(frozen=True, kw_only=True)
class PairPoint(TrainingPoint):
    """Both samples of each pair, noised by the same noise to the same level: first all that are preferred,
    then the others.
    """

    target: Streams  # [2 U, …] fp32, the velocity that leads from x0 to the noise


class DPO(Algorithm):
    """With D the mean squared error of the velocity eps - x0, of the current policy minus of the reference,

        loss = mean -log sigmoid(-beta / 2 (D(chosen) - D(rejected)))

    at one level of noise for each pair, sigma = sigmoid(z) with z standard normal.
    """

    Settings = DPOConfig
    settings: DPOConfig
    source = PREFERENCES
    needs = PAIRS
    policies = (CURRENT, REFERENCE)
    points_per_unit = 1

    def training_points(self, batch: Batch, schedules: Mapping[str, Schedule]) -> Iterator[PairPoint]:
        pairs = cast(Pairs, batch.units)
        sigma = torch.cat(
            [torch.sigmoid(standard_normal((1,), *who.address(TRAINING_TIMESTEP))) for who in pairs.identity]
        )
        both = map_streams(
            lambda chosen, rejected: torch.cat([chosen, rejected]), pairs.chosen, pairs.rejected
        )
        noise = map_streams(
            lambda eps: eps.repeat(2, *[1] * (eps.dim() - 1)), training_noise(pairs.identity, pairs.chosen, 0)
        )
        sigmas = {name: sigma.to(latents.device).repeat(2) for name, latents in both.items()}
        yield PairPoint(
            latents=noised(both, noise, sigmas),
            timesteps=map_streams(lambda level: level * NUM_TRAIN_TIMESTEPS, sigmas),
            conditions=stack_conditions([*pairs.conditions, *pairs.conditions]),
            negative=None,
            weights=batch.weights,
            target=map_streams(torch.sub, noise, both),
        )

    def loss(self, point: PairPoint, velocities: Mapping[str, Streams]) -> LossOutput:
        current = _errors(velocities[CURRENT], point.target)
        reference = _errors(map_streams(Tensor.detach, velocities[REFERENCE]), point.target)
        gains = reference - current  # [2, U]: how much better than the reference
        inside = preference(gains[0], gains[1], self.settings.beta)
        means = {
            "preference/margin": inside,
            "preference/accuracy": (inside > 0).float(),
            "preference/chosen": gains[0],
            "preference/rejected": gains[1],
        }
        loss = weighted_sum(-logsigmoid(inside), point.weights)
        return LossOutput(loss, {name: values.detach() for name, values in means.items()}, {})


def preference(chosen_gain: Tensor, rejected_gain: Tensor, beta: float) -> Tensor:
    """[U] the logit of the probability that the policy prefers the chosen sample. A gain is the error of the
    reference minus that of the policy.
    """
    return beta / 2 * (chosen_gain - rejected_gain)


def _errors(velocity: Streams, target: Streams) -> Tensor:
    """[2, U] mean squared errors, of the chosen and of the rejected."""
    return mean_square(map_streams(Tensor.float, velocity), target).reshape(2, -1)
