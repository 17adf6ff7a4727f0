"""JPEG compressibility of videos, frame by frame: smooth, simple frames score high. Needs no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.rewards.jpeg_compressibility import jpeg_score
from omnirl_hpc.rewards.reward import Reward, RewardBatch

POOLING: dict[str, Callable[[list[float]], float]] = {"mean": np.mean, "min": np.min, "max": np.max}


@dataclass
class VideoCompressibilityConfig(RewardPartConfig):
    pooling: str = "mean"  # of the scores of a video's frames: mean | min (the worst frame) | max

    def __post_init__(self) -> None:
        if self.pooling not in POOLING:
            raise ConfigError(
                f"pooling={self.pooling} of the reward video_compressibility must be {' or '.join(POOLING)}"
            )


class VideoCompressibility(Reward):
    """The score of `jpeg_compressibility` of every frame, pooled over the frames."""

    Settings = VideoCompressibilityConfig
    settings: VideoCompressibilityConfig
    needs = ("video",)

    def score(self, batch: RewardBatch) -> list[float]:
        pool = POOLING[self.settings.pooling]
        return [float(pool([jpeg_score(frame) for frame in frames])) for frames in batch.frames]
