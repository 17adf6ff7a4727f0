"""JPEG compressibility (DDPO, arXiv 2305.13301): smooth, simple images score high. Needs no model."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from omnirl_hpc.rewards.reward import Reward, RewardBatch

QUALITY = 95


class JpegCompressibility(Reward):
    """Minus the size of the image as a JPEG of quality 95, in units of 500 kB."""

    def score(self, batch: RewardBatch) -> list[float]:
        return [jpeg_score(image) for image in batch.images]


def jpeg_score(image: np.ndarray) -> float:
    """Of one image [H, W, 3] uint8."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=QUALITY)
    return -buffer.tell() / 1000 / 500
