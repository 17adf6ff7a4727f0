"""A guard for sound: what is silent, or too loud, scores low. Needs no model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.rewards.reward import Reward, RewardBatch

SILENCE = -96.0  # dBFS: the last bit of 16, quieter than which nothing is


@dataclass
class LoudnessConfig(RewardPartConfig):
    quietest: float = -50.0  # dBFS of the root mean square: quieter sound loses
    loudest: float = -10.0  # louder sound loses

    def __post_init__(self) -> None:
        if not SILENCE < self.quietest < self.loudest <= 0:
            raise ConfigError(
                f"quietest={self.quietest} and loudest={self.loudest} of the reward loudness must ascend "
                f"between {SILENCE:g} and 0 dBFS"
            )


class Loudness(Reward):
    """0 between `quietest` and `loudest`, and minus a point for every 10 dB outside. The level is that of all
    channels together, 10 log10 of the mean square; 0 dBFS is a sound of ±1 throughout.
    """

    Settings = LoudnessConfig
    settings: LoudnessConfig
    needs = ("audio",)

    def score(self, batch: RewardBatch) -> list[float]:
        assert batch.audio is not None  # as needed
        return [-self._outside(level(sound)) / 10 for sound in batch.audio]

    def _outside(self, decibels: float) -> float:
        return max(0.0, self.settings.quietest - decibels, decibels - self.settings.loudest)


def level(sound: np.ndarray) -> float:
    """dBFS of a waveform [channels, T] in [-1, 1]; SILENCE at the least."""
    mean_square = float(np.mean(np.square(sound, dtype=np.float64)))
    return max(SILENCE, 10 * np.log10(mean_square)) if mean_square > 0 else SILENCE
