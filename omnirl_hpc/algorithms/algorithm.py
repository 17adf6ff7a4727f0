"""The contract between an algorithm and the rest. Trainer, sources and actor read only this.

An algorithm is one file: its settings, a dataclass that checks itself, and its class. It holds no tensors and
changes none: what it is given comes back as new objects.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from omnirl_hpc.algorithms.units import Batch
from omnirl_hpc.config.schema import AlgorithmConfig, Config, WindowConfig
from omnirl_hpc.policies import CURRENT, REFERENCE, Blend
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import Streams

# Where units come from.
ROLLOUT = "rollout"  # samples that an engine generates and rewards score
PREFERENCES = "preferences"  # pairs in a table

# What an algorithm must know of them.
TRAJECTORY = "trajectory"  # the latents and log-probabilities of stochastic steps
CLEAN = "clean"  # the final latents
PAIRS = "pairs"  # the final latents of two samples, one preferred


@dataclass(frozen=True, kw_only=True)
class TrainingPoint:
    """One place at which the model is evaluated for a micro-batch of U units. Algorithms derive their own.

    The model is evaluated on B rows: one for each sample, two for a pair.
    """

    latents: Streams  # [B, …] fp32
    timesteps: Streams  # [B] fp32, what the model is called with
    conditions: dict[str, Tensor]  # [B, …], what the model reads besides
    negative: dict[str, Tensor] | None  # the same for guidance; None: no guidance
    weights: Tensor  # [U] fp32, of each unit in the loss; 0: it does not count


@dataclass(frozen=True)
class LossOutput:
    """The loss of one training point, and what to report about it."""

    loss: Tensor  # scalar: the weighted sum over units
    means: dict[str, Tensor]  # name -> [U] values; reported as their weighted mean
    maxima: dict[str, Tensor]  # name -> scalar; reported as the largest


Point = TypeVar("Point", bound=TrainingPoint)


class Algorithm(ABC, Generic[Point]):
    """How units become a loss.

    A training step calls, in this order: `window` and `advantages` where units are generated;
    `training_points` for each micro-batch; `loss` for each point; `after_step`.
    """

    Settings: ClassVar[type[AlgorithmConfig]] = (
        AlgorithmConfig  # a dataclass: what may be set, and its defaults
    )
    source: ClassVar[str] = ROLLOUT
    needs: ClassVar[str] = TRAJECTORY
    policies: tuple[str, ...] = (CURRENT,)  # whose velocities `loss` needs, the trained one first
    sampler: str = CURRENT  # the policy that the engine samples with
    # The actor evaluates the points of later updates before the first one changes it.
    recomputes_old: bool = False

    def __init__(self, config: Config) -> None:
        """Raises ConfigError where the settings of the algorithm and others disagree."""
        self.config = config
        self.settings = config.algorithm

    def remarks(
        self, schedules: Mapping[str, Schedule], shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterable[str]:
        """What a user should be told of settings that are allowed and may not be meant, once the schedules
        and the shapes of one sample's latents, by stream, are known.
        """
        return ()

    def window(self, step: int) -> WindowConfig | None:
        """Where the stochastic steps of a training step's samples may be; None: there are none."""
        return self.config.sampling.window if self.needs == TRAJECTORY else None

    @property
    def units_per_prompt(self) -> int:
        return self.config.data.samples_per_prompt if self.source == ROLLOUT else 1

    @property
    @abstractmethod
    def points_per_unit(self) -> int:
        """How many training points a unit has: for the planner."""

    def advantages(self, rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
        """[N] rewards of a whole step -> [N] advantages; mask False: no valid reward.
        For generated samples.
        """
        raise NotImplementedError(f"{type(self).__name__} has no use for rewards")

    @abstractmethod
    def training_points(self, batch: Batch, schedules: Mapping[str, Schedule]) -> Iterator[Point]:
        """Where the model is evaluated for a micro-batch, one place after the other: a point is made when it
        is asked for, and may be asked for again. Random draws are by the identity of a unit.

        schedules: of each stream, as the engine samples with them.
        """

    def points_of(self, update: Iterable[Batch], schedules: Mapping[str, Schedule]) -> Points[Point]:
        """The training points of one optimizer update, given by its micro-batches."""
        return Points(self, update, schedules)

    @abstractmethod
    def loss(self, point: Point, velocities: Mapping[str, Streams]) -> LossOutput:
        """The loss of one point from the velocities of `policies`, shaped as its latents."""

    def after_step(self, step: int) -> Sequence[Blend]:
        """Which policies follow another one after step `step` (0, 1, …), and how."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold for the algorithm to go on, beside the policies."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""


@dataclass(frozen=True)
class Points(Generic[Point]):
    """Made one by one while they are iterated over, which may be done more than once."""

    algorithm: Algorithm[Point]
    update: Iterable[Batch]
    schedules: Mapping[str, Schedule]

    def __iter__(self) -> Iterator[Point]:
        for micro_batch in self.update:
            yield from self.algorithm.training_points(micro_batch, self.schedules)


@dataclass(frozen=True, kw_only=True)
class LikelihoodPoint(TrainingPoint):
    """A point at which the policies have likelihoods."""

    rollout_log_prob: Tensor  # [B] fp32, of the engine
    old_log_prob: Tensor  # [B] fp32, of the policy that sampled, as the loss is to see it


@dataclass(frozen=True)
class Old:
    """What the actor makes of a point before the first update of a step changes it."""

    log_prob: Tensor  # [B] fp32
    means: Streams | None = None  # [B, …] fp32, of the transitions, where the loss compares with them


Scored = TypeVar("Scored", bound=LikelihoodPoint)


class LikelihoodAlgorithm(Algorithm[Scored]):
    """An algorithm with ratios of likelihoods: engine and actor are compared before anything is learned."""

    recomputes_old: bool = True  # otherwise the engine's log-probabilities are trusted
    tolerated_gap: float = math.inf  # between the engine's and the actor's, before they spoil the update

    @abstractmethod
    def log_prob(self, point: Scored, velocity: Streams) -> Tensor:
        """[B] log-probability of what was sampled under a model that predicts `velocity`."""

    def observe(self, point: Scored, velocity: Streams) -> Old:
        """What is to be remembered of the actor before the first update; `velocity` has no gradients."""
        return Old(self.log_prob(point, velocity))

    def with_old(self, point: Scored, old: Old) -> Scored:
        """The point as the loss is to see it."""
        return replace(point, old_log_prob=old.log_prob) if self.recomputes_old else point


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of values [U] x weights [U], where a unit of weight 0 counts nothing even if its value is not
    finite.
    """
    return torch.where(weights > 0, values * weights, torch.zeros_like(values)).sum()


def with_reference(policies: tuple[str, ...], coefficient: float) -> tuple[str, ...]:
    """`policies`, and the reference where something is to be kept near it."""
    return (*policies, REFERENCE) if coefficient > 0 else policies
