"""`report.html`: one file about a run, with everything in it, that opens offline and prints."""

from __future__ import annotations

import base64
import io
import os
import shlex
import wave
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from omnirl_hpc.evaluation.results import read_result
from omnirl_hpc.report.charts import area_chart, line_chart
from omnirl_hpc.report.records import Line, RunRecords, describe_rewards

SAMPLED_STEPS, SAMPLES_A_STEP = 8, 6
PAIRS = 12  # of images before and after
IMAGE_PIXELS, COMPARISON_PIXELS = 256, 1600  # the longer side, at most
# Of a preview: hundreds of frames and sound of full quality would make a page of hundreds of MB
VIDEO_FRAMES, SOUND_RATE = 32, 16000
NOT_PHASES = ("time/step", "time/reward")  # the sum of the others, and what ran beside them

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 1240px; margin: 0 auto; padding: 24px; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; } h2 { font-size: 18px; margin: 32px 0 10px; }
p { margin: 4px 0; } small, .dim { color: #666; font-weight: normal; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 18px 22px; }
figure { margin: 0; break-inside: avoid; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
.axes line { stroke: #e3e3e3; } .axes text { font-size: 12px; fill: #555; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 12px; font-size: 12px; padding-left: 14%; }
.legend i { display: inline-block; width: 10px; height: 10px; margin-right: 4px; }
.samples { display: grid; grid-template-columns: repeat(6, 1fr); gap: 12px; break-inside: avoid;
  margin-bottom: 14px; }
.samples img { width: 100%; display: block; }
.samples audio, .pair audio { width: 100%; height: 28px; }
.samples p { font-size: 12px; line-height: 1.3; overflow-wrap: anywhere; }
.samples .prompt { display: -webkit-box; -webkit-line-clamp: 4; -webkit-box-orient: vertical;
  overflow: hidden; }
.pairs { display: grid; grid-template-columns: repeat(3, 1fr); gap: 14px 26px; margin: 10px 0 14px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 4px; break-inside: avoid; }
.pair img { width: 100%; display: block; }
.pair p { font-size: 12px; line-height: 1.3; overflow-wrap: anywhere; }
h3 { font-size: 14px; margin: 12px 0 6px; break-after: avoid; } h2 { break-after: avoid; }
table { border-collapse: collapse; }
td, th { text-align: left; vertical-align: top; padding: 3px 14px 3px 0; border-bottom: 1px solid #e3e3e3; }
pre { background: #f6f6f6; padding: 10px 12px; font-size: 12px; white-space: pre-wrap;
  overflow-wrap: anywhere; }
pre.settings { columns: 3; } .comparison { max-width: 100%; max-height: 1100px; }
@media print { @page { margin: 14mm; } body { font-size: 11px; padding: 0; max-width: none; }
  .charts { grid-template-columns: repeat(2, 1fr); }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .comparison { max-height: 190mm; } }
"""


def write_report(records: RunRecords, out: Path | None = None) -> Path:
    """Write the page, whole or not at all, to `out` or RUN/report.html."""
    out = out or records.run.path / "report.html"
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text(render(records), encoding="utf-8")  # as the page says, whatever the locale
    os.replace(temporary, out)
    return out


def render(records: RunRecords) -> str:
    name = escape(records.run.path.resolve().name)
    sections = [
        ("Before and after", before_and_after(records)),
        ("Curves", f'<div class="charts">{"".join(charts(records))}</div>' if records.metrics else ""),
        ("Evaluation", evaluation(records)),
        ("Samples over time", samples(records)),
        ("What was chosen", table(records.environment.get("choices", {}))),
        ("How to make the same again", reproduction(records)),
    ]
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections if content)
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width">'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head>'
        f"<body><h1>{name}</h1>{summary(records)}{body}</body></html>\n"
    )


def summary(records: RunRecords) -> str:
    steps = "" if records.steps is None else f" of {records.steps}"
    facts = [
        f"recipe {records.recipe}",
        f"{records.steps_done}{steps} steps",
        records.state,
        describe_rewards(records),
    ]
    if seconds := records.seconds_a_step():
        facts.append(f"{seconds:.3g} s a step")
    if started := records.environment.get("started"):
        facts.append(f"started {started}")
    return f"<p>{escape(' · '.join(facts))}</p>"


def charts(records: RunRecords) -> list[str]:
    """Those that the run has values for."""
    steps = [line["step"] for line in records.metrics]

    def lines(*names: str, **renamed: str) -> dict[str, list[float | None]]:
        return {
            shown: records.column(name) for shown, name in ({name: name for name in names} | renamed).items()
        }

    phases = sorted(
        {name for line in records.metrics for name in line if name.startswith("time/")} - set(NOT_PHASES)
    )
    policies = sorted({name for line in records.metrics for name in line if name.startswith("evaluation/")})
    parts = sorted({name for line in records.metrics for name in line if name.startswith("reward/")})
    parts = [
        name
        for name in parts
        if name.removeprefix("reward/") not in ("mean", "std", "failed", "zero_std_groups")
    ]
    return [
        line_chart(
            "Reward",
            steps,
            {"mean": records.column("reward/mean")}
            | {"last 10": running_mean(records.column("reward/mean"))},
        ),
        line_chart("Parts of the reward", steps, lines(*parts) if len(parts) > 1 else {}),
        line_chart(
            "Evaluation", steps, {name.removeprefix("evaluation/"): records.column(name) for name in policies}
        ),
        line_chart("Reward, spread", steps, {"standard deviation": records.column("reward/std")}),
        line_chart(
            "Groups without spread, failed samples",
            steps,
            {"groups": records.column("reward/zero_std_groups"), "failed": records.column("reward/failed")},
        ),
        line_chart("Loss", steps, lines("loss")),
        line_chart("Gradient norm", steps, lines("grad_norm"), "before clipping"),
        line_chart("Likelihood ratio, mean", steps, lines("ratio/mean")),
        line_chart("Likelihood ratio, largest |log|", steps, lines("ratio/max_abs_log")),
        line_chart(
            "Engine against actor, |Δ log p|",
            steps,
            {
                "largest": records.column("ratio/first_update_max_abs_log"),
                "mean": records.column("ratio/first_update_mean_abs_log"),
            },
            "before the first update",
        ),
        line_chart("Clipped samples, fraction", steps, lines("clip_fraction")),
        line_chart(
            "KL divergence",
            steps,
            {"to the old policy": records.column("kl"), "to the reference": records.column("kl_reference")},
        ),
        line_chart("Learning rate", steps, lines("lr")),
        area_chart(
            "Seconds a step, by phase",
            steps,
            {name.removeprefix("time/"): [value or 0.0 for value in records.column(name)] for name in phases},
        ),
        line_chart("Images a second", steps, lines("images_per_second")),
        line_chart(
            "Peak memory, GiB",
            steps,
            {
                "GPU, rollout": records.column("memory/rollout_peak"),
                "GPU, actor": records.column("memory/actor_peak"),
                "host": records.column("memory/host_peak"),
            },
        ),
    ]


def running_mean(values: list[float | None], width: int = 10) -> list[float | None]:
    means = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - width) : end] if value is not None]
        means.append(sum(known) / len(known) if known else None)
    return means


def samples(records: RunRecords) -> str:
    """A row of images for some of the steps, the first and the last among them."""
    by_step: dict[int, list[Line]] = {}
    for sample in records.samples:
        by_step.setdefault(sample["step"], []).append(sample)
    rows = []
    for step in spread(sorted(by_step), SAMPLED_STEPS):
        pictures = [
            picture(records.run.samples / sample["file"], sample) for sample in by_step[step][:SAMPLES_A_STEP]
        ]
        if any(pictures):
            rows.append(f'<h3>step {step + 1}</h3><div class="samples">{"".join(pictures)}</div>')
    return "".join(rows)


def spread(items: list[int], count: int) -> list[int]:
    """At most `count` of the items, evenly, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def picture(path: Path, sample: Line) -> str:
    """An image, or a video with its sound, with prompt and score; nothing where the file is not there or not
    whole.
    """
    source = inline_video(path, IMAGE_PIXELS) or inline_jpeg(path, IMAGE_PIXELS, enlarge=True)
    if source is None:
        return ""
    reward = "no reward" if sample["reward"] is None else f"{sample['reward']:.4g}"
    prompt = escape(sample["prompt"])
    return (
        f'<div><img src="{source}" alt="{escape(sample["prompt"], quote=True)}">'
        f"{sound(path.with_suffix('.wav'))}<p><b>{reward}</b></p>"
        f'<p class="prompt" title="{escape(sample["prompt"], quote=True)}">{prompt}</p></div>'
    )


def inline_jpeg(path: Path, pixels: int, enlarge: bool = False) -> str | None:
    """As the source of an <img>, its longer side `pixels` at most, or exactly: JPEG in the size of a small
    image would smear its colours. None where the file is not there or not whole.
    """
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except (OSError, UnidentifiedImageError):
        return None
    buffer = io.BytesIO()
    resized(image, pixels, enlarge).save(buffer, format="JPEG", quality=82)
    return data_url("image/jpeg", buffer)


def inline_video(path: Path, pixels: int) -> str | None:
    """A moving preview as the source of an <img>, its longer side `pixels`, of VIDEO_FRAMES frames at most.
    None where the file is no video, not there or not whole.
    """
    if path.suffix != ".webp":
        return None
    try:
        with Image.open(path) as file:
            count = getattr(file, "n_frames", 1)
            step = -(-count // VIDEO_FRAMES)
            frames = []
            for number in range(0, count, step):
                file.seek(number)
                frames.append(resized(file.convert("RGB"), pixels, enlarge=True))
            duration = step * file.info["duration"]  # milliseconds of a frame
    except (OSError, EOFError, UnidentifiedImageError):
        return None
    buffer = io.BytesIO()
    frames[0].save(
        buffer, "WEBP", save_all=True, append_images=frames[1:], duration=duration, loop=0, quality=70
    )
    return data_url("image/webp", buffer)


def sound(path: Path) -> str:
    """The sound of a video as an element that plays it: of one channel, its rate SOUND_RATE or a little more.
    Nothing where the file is not there or not whole.
    """
    try:
        with wave.open(str(path)) as file:
            rate, channels = file.getframerate(), file.getnchannels()
            content = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error):
        return ""
    values = np.frombuffer(content, "<i2", count=len(content) // 2)
    samples = values[: len(values) // channels * channels].reshape(-1, channels)
    step = max(1, rate // SOUND_RATE)
    mono = samples.mean(axis=1)[: len(samples) // step * step].reshape(-1, step).mean(axis=1)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, rate // step, 0, "NONE", ""))
        file.writeframes(mono.round().astype("<i2").tobytes())
    return f'<audio controls src="{data_url("audio/wav", buffer)}"></audio>'


def resized(image: Image.Image, pixels: int, enlarge: bool) -> Image.Image:
    """Its longer side `pixels` at most, or exactly."""
    scale = pixels / max(image.size)
    if scale > 1 and not enlarge:
        return image
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)


def data_url(kind: str, buffer: io.BytesIO) -> str:
    return f"data:{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def evaluated(records: RunRecords) -> Iterator[tuple[int, Path]]:
    """(finished steps, folder) of the evaluations, the newest first. There may be other folders, of steps
    that the run went back from.
    """
    for done in reversed([line["step"] + 1 for line in records.metrics if "evaluation/adapter" in line]):
        yield done, records.run.evaluation / f"step_{done:06d}"


def before_and_after(records: RunRecords) -> str:
    """The first images of the newest evaluation, each one of the base beside the trained model's from the
    same noise.
    """
    base = read_result(records.run.evaluation / "base")
    for done, place in evaluated(records):
        trained = read_result(place / "adapter")
        if base is None or trained is None:
            continue
        pairs = []
        for before, after in list(zip(base["samples"], trained["samples"]))[:PAIRS]:
            pictures = [
                picture(folder / sample["file"], sample)
                for folder, sample in ((records.run.evaluation / "base", before), (place / "adapter", after))
            ]
            if all(pictures):
                pairs.append(f'<div class="pair">{"".join(pictures)}</div>')
        if pairs:
            return (
                f"<p>Left the base, right after {done} steps, from the same noise. Mean reward of "
                f"{len(trained['samples'])} images: <b>{base['reward']:.3g} → {trained['reward']:.3g}</b></p>"
                f'<div class="pairs">{"".join(pairs)}</div>{kinds_of_failure(records, base, trained)}'
            )
    return ""


def kinds_of_failure(records: RunRecords, base: Line, trained: Line) -> str:
    """Of images whose only reward is how much of a text can be read."""
    if list(records.config.get("reward", {}).get("parts", {})) != ["ocr"]:
        return ""

    def counts(result: Line) -> str:
        scores = [sample["reward"] for sample in result["samples"] if sample["reward"] is not None]
        whole, nothing = sum(score == 1 for score in scores), sum(score == 0 for score in scores)
        return "".join(f"<td>{count}</td>" for count in (whole, len(scores) - whole - nothing, nothing))

    return (
        "<table><tr><th>images with</th><th>the whole text</th><th>a part of it</th>"
        "<th>nothing to read</th></tr>"
        f"<tr><th>base</th>{counts(base)}</tr><tr><th>trained</th>{counts(trained)}</tr></table>"
    )


def evaluation(records: RunRecords) -> str:
    """The newest comparison of policies."""
    for done, place in evaluated(records):
        source = inline_jpeg(place / "comparison.jpg", COMPARISON_PIXELS)
        if source is not None and (place / "comparison.md").is_file():
            head, _, *rows = [
                [cell.strip() for cell in line.strip("|").split("|")]
                for line in (place / "comparison.md").read_text().splitlines()
            ]
            heading = "".join(f"<th>{escape(cell)}</th>" for cell in head)
            lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
            return (
                f"<p>After {done} steps, on fixed prompts from fixed "
                f"noise.</p><table><tr>{heading}</tr>{lines}</table>"
                f'<p><img class="comparison" src="{source}" alt="images of the policies side by side"></p>'
            )
    return ""


def reproduction(records: RunRecords) -> str:
    environment = records.environment
    packages = {name: version for name, version in environment.get("packages", {}).items() if version}
    facts = {
        "commit": environment.get("commit") or "not a checkout",
        "omnirl_hpc": environment.get("omnirl_hpc", "-"),
        "python": environment.get("python", "-"),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "host": environment.get("host", "-"),
    }
    command = shlex.join(["omnirl-hpc", *environment.get("command", [""])[1:]])
    settings = escape(records.run.config.read_text())
    return (
        "<p>With determinism=strict, on the same number of ranks, this command gives the same bits; "
        f"omnirl-hpc compare proves it.</p><pre>{escape(command)}</pre>{table(facts)}"
        f'<h3>All settings (config.yaml)</h3><pre class="settings">{settings}</pre>'
    )


def table(rows: dict[str, Any]) -> str:
    body: Iterable[str] = (
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in rows.items()
    )
    return f"<table>{''.join(body)}</table>" if rows else ""
