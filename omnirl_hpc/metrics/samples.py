"""Samples of a run, with their prompts and scores."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.metrics.media_files import write_media
from omnirl_hpc.run_directory import RunDirectory
from omnirl_hpc.sampling.samples import Media


def save_samples(
    run: RunDirectory, step: int, media: Media, prompts: Sequence[Prompt], rewards: Sequence[float]
) -> None:
    """Write N samples, and a line of index.jsonl for each. A reward of NaN, which is none, becomes null."""
    with run.writing(run.samples), (run.samples / "index.jsonl").open("a") as index:
        for i, (prompt, reward) in enumerate(zip(prompts, rewards)):
            name = write_media(run.samples / f"step_{step:06d}_{i:02d}", media[i : i + 1])
            score = reward if math.isfinite(reward) else None
            index.write(
                json.dumps(
                    {"step": step, "file": name, "prompt": prompt.prompt, "id": prompt.id, "reward": score}
                )
                + "\n"
            )
