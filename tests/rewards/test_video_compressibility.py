"""JPEG compressibility of videos. Expected values: the reward for images, frame by frame."""

from __future__ import annotations

import numpy as np
import pytest

from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.rewards.jpeg_compressibility import JpegCompressibility
from omnirl_hpc.rewards.reward import RewardBatch
from omnirl_hpc.rewards.video_compressibility import VideoCompressibility, VideoCompressibilityConfig

VIDEOS = np.random.default_rng(0).integers(0, 256, (2, 3, 32, 48, 3), dtype=np.uint8)
VIDEOS[0, 1] //= 16  # of less contrast than its neighbours
VIDEOS[1, 2] = 128
PROMPTS = [Prompt("0", "p"), Prompt("1", "q")]


def frame_scores(frames: np.ndarray) -> list[float]:
    batch = RewardBatch(frames[:, None], [Prompt(str(i), "p") for i in range(len(frames))])
    return JpegCompressibility(RewardPartConfig()).score(batch)


@pytest.mark.parametrize(("pooling", "pool"), [("mean", np.mean), ("min", min), ("max", max)])
def test_frames_are_pooled(pooling, pool):
    reward = VideoCompressibility(VideoCompressibilityConfig(pooling=pooling))
    expected = [pool(frame_scores(video)) for video in VIDEOS]
    assert reward.score(RewardBatch(VIDEOS, PROMPTS, fps=8.0)) == pytest.approx(expected)
    assert len({*frame_scores(VIDEOS[0])}) == 3  # so that poolings differ


def test_an_unknown_pooling_is_refused():
    with pytest.raises(
        ConfigError, match="pooling=median of the reward video_compressibility must be mean or"
    ):
        VideoCompressibilityConfig(pooling="median")
