"""The protocol of a reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Sequence

import numpy as np

from omnirl_hpc.data.prompts import Prompt


@dataclass(frozen=True)
class RewardBatch:
    """B samples to score."""

    images: np.ndarray  # [B, H, W, 3] uint8
    prompts: list[Prompt]


class Reward(ABC):
    """Scores images. Made once in each worker process; `score` is then called there for one micro-batch at a time."""

    @abstractmethod
    def score(self, batch: RewardBatch) -> Sequence[float]:
        """One score for each sample, higher is better. NaN: this sample could not be scored."""
