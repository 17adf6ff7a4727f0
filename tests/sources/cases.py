"""Tables of preferences for the tiny model."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import save

PROMPTS = ("a cat", "a dog on a sofa", "two birds", "a red house", "the sea", "an old tree")


def image_bytes(seed: int, height: int = 32, width: int = 32, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def write_images(path: Path, **size: int) -> Path:
    """One image of each pair as bytes in the row, the other as a file beside the table."""
    rejected = []
    for i in range(len(PROMPTS)):
        (path.parent / f"rejected_{i}.png").write_bytes(image_bytes(100 + i, **size))
        rejected.append({"bytes": None, "path": f"rejected_{i}.png"})
    chosen = [{"bytes": image_bytes(i, **size), "path": None} for i in range(len(PROMPTS))]
    pq.write_table(pa.table({"prompt": PROMPTS, "chosen": chosen, "rejected": rejected}), path)
    return path


def latents(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def write_latents(path: Path, shape: tuple[int, ...]) -> Path:
    def column(first: int) -> list[bytes]:
        return [save({"latents": latents(first + i, shape)}) for i in range(len(PROMPTS))]

    table = {"prompt": PROMPTS, "chosen_latents": column(0), "rejected_latents": column(100)}
    pq.write_table(pa.table(table), path, row_group_size=4)
    return path
