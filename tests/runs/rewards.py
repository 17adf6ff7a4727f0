"""A reward that fails. Worker processes import this module."""

from __future__ import annotations

import math

from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.rewards.jpeg_compressibility import JpegCompressibility
from omnirl_hpc.rewards.reward import RewardBatch


class Unreliable(JpegCompressibility):
    """Raises in its first call, and gives no score for the first sample of its third."""

    def __init__(self, settings: RewardPartConfig) -> None:
        super().__init__(settings)
        self.calls = 0

    def score(self, batch: RewardBatch) -> list[float]:
        self.calls += 1
        if self.calls == 1:
            raise OSError("the scorer is out of paper")
        scores = super().score(batch)
        return [math.nan, *scores[1:]] if self.calls == 3 else scores
