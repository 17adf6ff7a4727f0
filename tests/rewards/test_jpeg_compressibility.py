"""JPEG compressibility."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.rewards.jpeg_compressibility import JpegCompressibility
from omnirl_hpc.rewards.reward import RewardBatch


def score(*images: np.ndarray) -> list[float]:
    return JpegCompressibility(RewardPartConfig()).score(
        RewardBatch(np.stack(images)[:, None], [Prompt(str(i), "p") for i in range(len(images))])
    )


FLAT = np.full((64, 64, 3), 128, np.uint8)
GRADIENT = np.broadcast_to(np.arange(0, 256, 4, dtype=np.uint8)[:, None, None], (64, 64, 3)).copy()
NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


def test_smooth_images_score_higher():
    flat, gradient, noise = score(FLAT, GRADIENT, NOISE)
    assert noise < gradient < flat < 0


def test_is_minus_kilobytes_over_500():
    # DDPO's -kB, scaled as in verl_omni.md section 3: 1 kB = 1000 bytes, divided by 500
    buffer = io.BytesIO()
    Image.fromarray(NOISE).save(buffer, "jpeg", quality=95)
    assert score(NOISE) == pytest.approx([-len(buffer.getvalue()) / 500_000])


def test_a_sample_does_not_depend_on_its_neighbours():
    assert score(NOISE, FLAT) == score(NOISE) + score(FLAT) == score(FLAT, NOISE)[::-1]
