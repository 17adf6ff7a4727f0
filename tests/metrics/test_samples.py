"""Samples as files, and their index."""

from __future__ import annotations

import json
import math
import wave

import numpy as np
import pytest
import torch
from PIL import Image

from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.metrics.media_files import picture_suffix, write_media
from omnirl_hpc.metrics.samples import save_samples
from omnirl_hpc.run_directory import RunDirectory
from omnirl_hpc.sampling.samples import Media


def media(pixels: np.ndarray) -> Media:
    """Images [B, H, W, 3]."""
    return Media(torch.from_numpy(pixels).permute(0, 3, 1, 2)[:, None])


def test_images_are_kept_bit_for_bit_with_prompt_and_score(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 6, 3), dtype=np.uint8)
    run = RunDirectory(tmp_path)
    run.create()
    save_samples(run, 3, media(images), [Prompt("a", "un café"), Prompt("b", "a dog")], [0.5, -1.0])
    save_samples(run, 4, media(images[:1]), [Prompt("a", "un café")], [0.25])
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
    save_samples(run, 0, media(np.zeros((1, 4, 4, 3), np.uint8)), [Prompt("a", "a")], [math.nan])
    assert json.loads((run.samples / "index.jsonl").read_text())["reward"] is None


def test_a_video_moves_and_has_its_sound(tmp_path):
    """Frames of flat colours, which the picture's compression keeps; a sound of two channels."""
    frames = torch.stack([torch.full((3, 16, 16), level, dtype=torch.uint8) for level in (0, 100, 200)])
    sound = torch.tensor([[[0.0, 0.5, -2.0]], [[1.0, 0.0, 0.25]]]).squeeze(1)[None]
    video = Media(frames[None], sound, fps=8.0, sample_rate=16000)
    assert write_media(tmp_path / "clip", video) == "clip" + picture_suffix(video) == "clip.webp"
    with Image.open(tmp_path / "clip.webp") as picture:
        assert picture.n_frames == 3
        shown = []
        for number in range(3):
            picture.seek(number)
            shown.append((np.asarray(picture.convert("RGB")).mean(), picture.info["duration"]))
    assert [level for level, _ in shown] == pytest.approx([0, 100, 200], abs=2)
    assert {duration for _, duration in shown} == {125}
    with wave.open(str(tmp_path / "clip.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 16000, 3)
        played = np.frombuffer(file.readframes(3), "<i2").reshape(3, 2)
    assert played.tolist() == [[0, 32767], [16384, 0], [-32767, 8192]]
