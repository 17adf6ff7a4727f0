"""The guard for sound. Expected values: the level of sines and constants, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.rewards.loudness import SILENCE, Loudness, LoudnessConfig, level
from omnirl_hpc.rewards.reward import RewardBatch

SINE = np.sin(2 * np.pi * np.arange(1000) / 100, dtype=np.float32)  # whole periods


def score(*sounds: np.ndarray, **settings: float) -> list[float]:
    batch = RewardBatch(
        np.zeros((len(sounds), 2, 4, 4, 3), np.uint8),
        [Prompt(str(i), "p") for i in range(len(sounds))],
        audio=np.stack(sounds),
        fps=8.0,
        sample_rate=16000,
    )
    return Loudness(LoudnessConfig(**settings)).score(batch)


def test_the_level_is_that_of_all_channels():
    assert level(np.ones((2, 10))) == 0
    assert level(SINE[None]) == pytest.approx(-3.0103, abs=1e-3)  # a sine has half the power of its peak
    assert level(np.stack([SINE, 0 * SINE])) == pytest.approx(-6.0206, abs=1e-3)
    assert level(0.1 * SINE[None]) == pytest.approx(-23.0103, abs=1e-3)
    assert level(np.zeros((2, 10))) == level(np.full((1, 10), 1e-9)) == SILENCE


def test_what_is_outside_of_the_limits_loses_a_point_for_ten_decibels():
    quiet, usual, loud = 1e-3 * np.ones((2, 10)), 0.1 * np.ones((2, 10)), np.ones((2, 10))
    assert score(quiet, usual, loud) == pytest.approx([-1, 0, -1])  # -60, -20 and 0 dBFS
    assert score(quiet, usual, loud, quietest=-70, loudest=-30) == pytest.approx([0, -1, -3])
    assert score(np.zeros((2, 10))) == [(SILENCE + 50) / 10]


@pytest.mark.parametrize("settings", [{"quietest": -5}, {"loudest": 3}, {"quietest": -200}])
def test_limits_that_do_not_ascend_are_refused(settings):
    with pytest.raises(ConfigError, match="of the reward loudness must ascend between -96 and 0 dBFS"):
        LoudnessConfig(**settings)
