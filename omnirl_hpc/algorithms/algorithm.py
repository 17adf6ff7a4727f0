"""The contract between an algorithm and the rest. Trainer and actor read only this."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from omnirl_hpc.config.schema import AlgorithmConfig, Config
from omnirl_hpc.policies import CURRENT, Blend
from omnirl_hpc.sampling.samples import Samples
from omnirl_hpc.sampling.streams import Streams


@dataclass
class TrainingPoint:
    """One place at which the model is evaluated for a micro-batch of B samples."""

    latents: Streams  # [B, …] fp32
    timesteps: Streams  # [B] fp32, what the model is called with
    conditions: dict[str, Tensor]  # [B, …], what the model reads besides
    negative: dict[str, Tensor] | None  # the same for guidance; None: no guidance
    advantages: Tensor  # [B] fp32
    # [B] fp32, of each sample in the loss; 0 for samples without a reward; the update's weights sum to 1
    weights: Tensor
    extras: dict[str, Any] = field(default_factory=dict)  # what the algorithm's loss needs besides, [B, …]


@dataclass
class LossOutput:
    """The loss of one training point, and what to report about it."""

    loss: Tensor  # scalar: the weighted sum over samples
    means: dict[str, Tensor]  # name -> [B] values; reported as their weighted mean
    maxima: dict[str, Tensor]  # name -> scalar; reported as the largest


class Algorithm(ABC):
    """How samples and rewards become a loss.

    A training step calls, in this order: `advantages` on the rewards of all ranks; `training_points` for each
    micro-batch; `before_first_update` for each point; `loss` for each point; `after_step`.
    """

    Settings: ClassVar[type[AlgorithmConfig]] = (
        AlgorithmConfig  # a dataclass: what may be set, and its defaults
    )
    policies: tuple[str, ...] = (CURRENT,)  # whose velocities `loss` needs, the trained one first
    sampler: str = CURRENT  # the policy that the engine samples with
    recomputes_old_log_prob: bool = (
        False  # the actor evaluates the points of later updates before the first one changes it
    )
    tolerated_gap: float = (
        math.inf
    )  # between the engine's and the actor's log-probabilities, before they spoil the update

    def __init__(self, config: Config) -> None:
        self.config = config
        self.settings = config.algorithm

    @abstractmethod
    def advantages(self, rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
        """[N] rewards of a whole step -> [N] advantages; mask False: no valid reward."""

    @abstractmethod
    def training_points(self, batch: Samples, advantages: Tensor, weights: Tensor) -> list[TrainingPoint]:
        """Where the model is evaluated for a micro-batch."""

    def before_first_update(self, point: TrainingPoint, velocity: Streams) -> Tensor | None:
        """Look at a point with the velocity of the policy that sampled it, without gradients.

        Called for every point of the step where `recomputes_old_log_prob`, otherwise for those of the first
        update only. Returns [B]
        |log p of the actor - log p of the engine| of the point's transition; None where an algorithm has no likelihoods.
        """
        return None

    @abstractmethod
    def loss(self, point: TrainingPoint, velocities: dict[str, Streams]) -> LossOutput:
        """The loss of one point from the velocities of `policies`, shaped as its latents."""

    def after_step(self, step: int) -> Sequence[Blend]:
        """Which policies follow the current one after step `step` (0, 1, …), and how."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold for the algorithm to go on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of values [B] x weights [B], where a sample of weight 0 counts nothing even if its value is not
    finite.
    """
    return torch.where(weights > 0, values * weights, torch.zeros_like(values)).sum()
