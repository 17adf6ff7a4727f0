"""The report: everything in one file, nothing from outside, right where files are torn."""

from __future__ import annotations

import base64
import io
import json
import re
import wave
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

from omnirl_hpc.errors import ConfigError
from omnirl_hpc.metrics.media_files import write_media
from omnirl_hpc.report.page import (
    charts,
    kinds_of_failure,
    picture,
    running_mean,
    spread,
    write_report,
)
from omnirl_hpc.report.records import RunRecords
from omnirl_hpc.sampling.samples import Media
from tests.cli.run_states import make_state


class Page(HTMLParser):
    """Tags, text and whatever a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.sources, self.words, self.stack = [], [], [], []
        self.feed(text)
        assert self.stack == []  # every element is closed

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [
            value for name, value in attributes if name in ("src", "href", "srcset", "data", "action")
        ]
        if tag not in ("meta", "link", "img"):
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def page_of(run, tmp_path) -> Page:
    return Page(write_report(RunRecords.read(run), tmp_path / "page.html").read_text())


def pairs(run) -> int:
    return len(json.loads((run / "evaluation/base/result.json").read_text())["samples"])


def test_everything_is_in_the_file(finished_run, tmp_path):
    page = page_of(finished_run, tmp_path)
    text = " ".join(page.words)
    for wanted in (
        "Reward",
        "Gradient norm",
        "Clipped samples, fraction",
        "Likelihood ratio, mean",
        "Seconds a step, by phase",
    ):
        assert wanted in text
    for wanted in (
        "3 of 3 steps",
        "finished",
        "better than base",
        "FSDP2",
        "omnirl-hpc train",
        "steps: 3",
        "samples_per_prompt",
    ):
        assert wanted in text
    # six images a step, one comparison, and pairs before and after
    assert page.tags.count("svg") >= 12 and page.tags.count("img") == 3 * 6 + 1 + 2 * pairs(finished_run)
    for source in page.sources:
        kind, _, data = source.partition(",")
        if kind == "data:":
            continue  # no icon
        assert kind == "data:image/jpeg;base64"
        Image.open(io.BytesIO(base64.b64decode(data))).load()
    style = re.search("<style>(.*)</style>", (tmp_path / "page.html").read_text(), re.S).group(1)
    assert "url(" not in style and "@import" not in style and "@media print" in style
    assert "script" not in page.tags


def test_scores_and_prompts_stand_below_the_images(finished_run, tmp_path):
    samples = [json.loads(line) for line in (finished_run / "samples/index.jsonl").read_text().splitlines()]
    words = page_of(finished_run, tmp_path).words
    assert f"{samples[0]['reward']:.4g}" in words and samples[0]["prompt"] in words


def test_a_prompt_cannot_break_the_page(finished_run, tmp_path):
    run = make_state("finished", finished_run, tmp_path)
    index = run / "samples/index.jsonl"
    samples = [json.loads(line) | {"prompt": '<script>"&</p>'} for line in index.read_text().splitlines()]
    index.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    page = page_of(run, tmp_path)
    assert "script" not in page.tags and '<script>"&</p>' in page.words


@pytest.mark.parametrize(
    ("state", "images", "said"),
    [
        ("finished", 23, "finished"),
        ("running", 23, "running: slurm job 7"),
        ("started", 0, "it has not finished a step"),
        ("torn", 17, "stopped or killed"),
    ],
)
def test_states_of_a_run(finished_run, tmp_path, state, images, said):
    """Torn: the images of the first step are half there, as are the last line of metrics and the last
    sample.
    """
    page = page_of(make_state(state, finished_run, tmp_path), tmp_path)
    assert page.tags.count("img") == images
    assert said in " ".join(page.words)


def test_an_evaluation_that_the_run_went_back_from_is_not_shown(finished_run, tmp_path):
    run = make_state("finished", finished_run, tmp_path)
    metrics = run / "metrics.jsonl"
    metrics.write_text(
        "".join(metrics.read_text().splitlines(keepends=True)[:2])
    )  # as checkpoint.resume_step=2 leaves it
    words = " ".join(page_of(run, tmp_path).words)
    assert "After 2 steps, on fixed prompts" in words and "After 3 steps" not in words


@pytest.mark.parametrize(
    ("state", "said"), [("missing", "does not exist"), ("empty", "it has no config.yaml")]
)
def test_what_is_no_run(finished_run, tmp_path, state, said):
    with pytest.raises(ConfigError, match=said):
        RunRecords.read(make_state(state, finished_run, tmp_path))


def test_the_first_and_the_last_are_always_shown():
    assert spread([3], 8) == [3] and spread(list(range(8)), 8) == list(range(8))
    assert spread(list(range(100)), 4) == [0, 33, 66, 99]


def test_running_mean_leaves_out_what_is_missing():
    assert running_mean([1.0, None, 4.0, 5.0], width=2) == [1.0, 1.0, 4.0, 4.5]


def test_the_report_at_the_end_of_a_run_says_that_it_has_ended(finished_run):
    assert " 3 of 3 steps · finished · " in (finished_run / "report.html").read_text()


def test_every_curve_is_of_a_metric_that_runs_have(finished_run, monkeypatch):
    records, asked, column = RunRecords.read(finished_run), set(), RunRecords.column
    monkeypatch.setattr(RunRecords, "column", lambda self, name: asked.add(name) or column(self, name))
    assert charts(records)
    assert asked - {"kl_reference"} <= records.metrics[-1].keys()  # that one only with algorithm.kl_coef


def test_the_first_screen_shows_images_before_and_after(finished_run, tmp_path):
    """Of the newest evaluation, the same prompts from the same noise side by side."""
    place = finished_run / "evaluation"
    before, after = (
        json.loads((place / folder / "result.json").read_text()) for folder in ("base", "step_000003/adapter")
    )
    text = write_report(RunRecords.read(finished_run), tmp_path / "page.html").read_text()
    assert text.index("Before and after") < text.index("Curves")
    assert f"<b>{before['reward']:.3g} → {after['reward']:.3g}</b>" in text
    shown = re.findall(r'<div class="pair">.*?<b>(.*?)</b>.*?<b>(.*?)</b>', text)
    assert shown == [
        tuple(f"{sample['reward']:.4g}" for sample in pair)
        for pair in zip(before["samples"], after["samples"])
    ]
    assert "the whole text" not in text  # only of a reward that reads


def test_kinds_of_failure_are_counted_where_the_reward_reads(finished_run):
    records = RunRecords.read(finished_run)
    reading = replace(records, config=records.config | {"reward": {"parts": {"ocr": {}}}})

    def result(*scores):
        return {"samples": [{"reward": score} for score in scores]}

    table = kinds_of_failure(reading, result(0.0, 0.5, 0.75, None), result(1.0, 1.0, 0.5, 0.0))
    assert re.findall(r"<td>(\d+)</td>", table) == ["0", "2", "1", "2", "1", "1"]
    assert kinds_of_failure(records, result(0.0), result(1.0)) == ""


def embedded(page: str, kind: str) -> io.BytesIO:
    (content,) = re.findall(f'src="data:{kind};base64,([^"]*)"', page)
    return io.BytesIO(base64.b64decode(content))


def test_a_video_moves_and_sounds_in_the_page(tmp_path):
    """Every second one of 40 frames, and a third of the samples of a sound of two channels."""
    levels = torch.arange(0, 200, 5, dtype=torch.uint8)
    frames = levels[:, None, None, None].expand(40, 3, 16, 32).clone()
    tones = torch.stack([torch.full((48000,), level) for level in (0.5, 0.25)])
    clip = Media(frames[None], tones[None], fps=20.0, sample_rate=48000)
    name = write_media(tmp_path / "clip", clip)
    page = picture(tmp_path / name, {"prompt": "a <b>", "reward": 0.5})
    with Image.open(embedded(page, "image/webp")) as video:
        assert video.n_frames == 20 and video.size == (256, 128)
        video.seek(3)
        assert np.asarray(video.convert("RGB")).mean() == pytest.approx(6 * 5, abs=3)
        assert video.info["duration"] == 100
    with wave.open(embedded(page, "audio/wav")) as sound:
        assert (sound.getnchannels(), sound.getframerate(), sound.getnframes()) == (1, 16000, 16000)
        played = np.frombuffer(sound.readframes(100), "<i2")
    assert played == pytest.approx(0.375 * 32767, abs=1)


@pytest.mark.parametrize("damage", [lambda content: content[: len(content) // 2], lambda content: b""])
def test_a_video_that_is_not_whole_leaves_the_page_whole(tmp_path, damage):
    clip = Media(torch.randint(0, 255, (1, 4, 3, 16, 16), dtype=torch.uint8), torch.zeros(1, 1, 9), 8.0, 8000)
    file = tmp_path / write_media(tmp_path / "clip", clip)
    for path in (file, file.with_suffix(".wav")):
        path.write_bytes(damage(path.read_bytes()))
    assert "<audio" not in picture(file, {"prompt": "p", "reward": None})
