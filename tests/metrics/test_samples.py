"""Sample images and their index."""

from __future__ import annotations

import json
import math

import numpy as np
from PIL import Image

from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.metrics.samples import save_samples
from omnirl_hpc.run_directory import RunDirectory


def test_images_are_kept_bit_for_bit_with_prompt_and_score(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 6, 3), dtype=np.uint8)
    run = RunDirectory(tmp_path)
    run.create()
    save_samples(run, 3, images, [Prompt("a", "un café"), Prompt("b", "a dog")], [0.5, -1.0])
    save_samples(run, 4, images[:1], [Prompt("a", "un café")], [0.25])
    index = [json.loads(line) for line in (run.samples / "index.jsonl").read_text().splitlines()]
    assert index == [
        {"step": 3, "file": "step_000003_00.png", "prompt": "un café", "id": "a", "reward": 0.5},
        {"step": 3, "file": "step_000003_01.png", "prompt": "a dog", "id": "b", "reward": -1.0},
        {"step": 4, "file": "step_000004_00.png", "prompt": "un café", "id": "a", "reward": 0.25},
    ]
    for line, image in zip(index, [*images, images[0]]):
        assert np.array_equal(np.asarray(Image.open(run.samples / line["file"])), image)


def test_a_missing_reward_is_null(tmp_path):
    run = RunDirectory(tmp_path)
    run.create()
    save_samples(run, 0, np.zeros((1, 4, 4, 3), np.uint8), [Prompt("a", "a")], [math.nan])
    assert json.loads((run.samples / "index.jsonl").read_text())["reward"] is None
