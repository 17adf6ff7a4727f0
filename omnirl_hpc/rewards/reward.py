"""The protocol of a reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import RewardConfig, RewardPartConfig
from omnirl_hpc.data.prompts import Prompt


@dataclass(frozen=True)
class RewardBatch:
    """B samples to score."""

    frames: np.ndarray  # [B, F, H, W, 3] uint8; F = 1: images
    prompts: list[Prompt]
    audio: np.ndarray | None = None  # [B, channels, T] fp32
    fps: float = 0.0  # frames a second
    sample_rate: int = 0  # of the sound, in Hz

    @property
    def images(self) -> np.ndarray:
        """[B, H, W, 3] uint8. Raises ValueError for videos."""
        if self.frames.shape[1] != 1:
            raise ValueError(f"samples are videos of {self.frames.shape[1]} frames, not images")
        return self.frames[:, 0]


class Reward(ABC):
    """Scores samples. Made once in each worker process; `score` is then called there for one micro-batch at a
    time.

    The module is imported in the rank's own process too: a reward imports its `packages` when it is made, not
    before.
    """

    Settings: ClassVar[type[RewardPartConfig]] = (
        RewardPartConfig  # a dataclass: what may be set, and its defaults
    )
    needs: ClassVar[tuple[str, ...]] = ("image",)  # image | video | audio, of which the model must make each
    needs_target: ClassVar[bool] = False  # every prompt must have one
    metadata: ClassVar[tuple[str, ...]] = ()  # other columns of the prompt table, in `prompt.metadata`
    packages: ClassVar[tuple[str, ...]] = ()  # beyond this package's own requirements

    def __init__(self, settings: RewardPartConfig) -> None:
        self.settings = settings

    @abstractmethod
    def score(self, batch: RewardBatch) -> Sequence[float]:
        """One score for each sample, higher is better. NaN: this sample could not be scored."""


def metadata_columns(config: RewardConfig) -> tuple[str, ...]:
    """The columns of the prompt table that the rewards of a run read, beside prompt, target and id."""
    classes = [find_class("reward", part.name) for part in config.parts.values()]
    return tuple(dict.fromkeys(column for reward in classes for column in reward.metadata))
