"""Sample images of a run, with their prompts and scores."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.run_directory import RunDirectory


def save_samples(
    run: RunDirectory, step: int, images: np.ndarray, prompts: Sequence[Prompt], rewards: Sequence[float]
) -> None:
    """Write images [N, H, W, 3] uint8 as PNG, and a line of index.jsonl for each. A reward of NaN, which is
    none, becomes null.
    """
    with run.writing(run.samples), (run.samples / "index.jsonl").open("a") as index:
        for i, (image, prompt, reward) in enumerate(zip(images, prompts, rewards)):
            name = f"step_{step:06d}_{i:02d}.png"
            Image.fromarray(image).save(run.samples / name)
            score = reward if math.isfinite(reward) else None
            index.write(
                json.dumps(
                    {"step": step, "file": name, "prompt": prompt.prompt, "id": prompt.id, "reward": score}
                )
                + "\n"
            )
