"""Learning curves of settings, by seeds: a table and a plot.

    python benchmarks/learning.py OUT --seeds 0 1 2 3 4 \\
        --runs "sde:" "cps:sampling=cps algorithm.clip_range=1e-4"

Each run is NAME:OVERRIDES of recipe=flowgrpo_glyph (--recipe), once for each seed, on --ranks processes, in
OUT/NAME/seed_N. Writes OUT/learning.md and OUT/learning.svg: the score on held-out words before and after,
the images and seconds until it first reached --score. A benchmark that was stopped goes on with the same
command, and so does each of its runs. Seconds leave out evaluations and checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from omnirl_hpc.report.charts import COLORS, ticks

NOT_LEARNING = ("time/evaluation", "time/checkpoint")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 50, 170, 16, 40  # pixels of the plot


@dataclass(frozen=True)
class Point:
    """The score on the held-out words after so many images and seconds."""

    images: int
    seconds: float
    score: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", nargs="+", default=["base:"], metavar="NAME:OVERRIDES")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--recipe", default="flowgrpo_glyph")
    parser.add_argument("--model", type=Path, help="a checkpoint; default: the Glyph that the package ships")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--score", type=float, default=0.6, help="the score whose images and seconds are told"
    )
    options = parser.parse_args()
    settings = dict(run.partition(":")[::2] for run in options.runs)
    model = options.model or make_once(options.out / "model", "glyph-model")
    words = make_once(options.out / "train.parquet", "prompts", "--kind", "glyph")
    held_out = make_once(options.out / "held_out.parquet", "prompts", "--kind", "glyph", "--held-out")
    common = [
        f"recipe={options.recipe}",
        f"model.path={model}",
        f"data.prompts={words}",
        f"evaluation.prompts={held_out}",
    ]
    curves: dict[str, list[list[Point]]] = {}
    for name, overrides in settings.items():
        for seed in options.seeds:
            folder = options.out / name / f"seed_{seed}"
            train(folder, options.ranks, [*common, f"seed={seed}", *overrides.split()])
            curves.setdefault(name, []).append(list(read_curve(folder)))
            write(options.out, curves, settings, options.score)


def make_once(out: Path, command: str, *arguments: str) -> Path:
    """What `omnirl-hpc COMMAND OUT …` writes, where it is not there from an earlier call."""
    if not out.exists():
        subprocess.run([sys.executable, "-m", "omnirl_hpc", command, str(out), *arguments], check=True)
    return out


def train(folder: Path, ranks: int, overrides: Sequence[str]) -> None:
    """A run that is complete ends at once; one that was stopped goes on."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "omnirl_hpc"]
    with folder.with_suffix(".log").open("a") as log:
        subprocess.run(
            [sys.executable, "-m", *launcher, "train", f"run_dir={folder}", *overrides],
            check=True,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def read_curve(folder: Path) -> Iterator[Point]:
    """The first point is the base, before any training."""
    images, seconds, first = 0, 0.0, True
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        images += round(metrics["images_per_second"] * metrics["time/step"])
        seconds += metrics["time/step"] - sum(metrics[name] for name in NOT_LEARNING)
        if "evaluation/adapter" in metrics:
            if first:
                yield Point(0, 0.0, metrics["evaluation/base"])
                first = False
            yield Point(images, seconds, metrics["evaluation/adapter"])


def write(out: Path, curves: dict[str, list[list[Point]]], settings: dict[str, str], score: float) -> None:
    (out / "learning.md").write_text(table(curves, settings, score) + "\n")
    (out / "learning.svg").write_text(plot(curves))


def table(curves: dict[str, list[list[Point]]], settings: dict[str, str], score: float) -> str:
    head = [
        "run",
        "seeds",
        "before",
        "after",
        "smallest gain",
        f"images to {score:g}",
        f"seconds to {score:g}",
    ]
    lines = [f"| {' | '.join([*head, 'settings'])} |", "|---" * (len(head) + 1) + "|"]
    for name, seeds in curves.items():
        before = [curve[0].score for curve in seeds]
        after = [curve[-1].score for curve in seeds]
        reached = [next((point for point in curve if point.score >= score), None) for curve in seeds]
        cells = [
            name,
            str(len(seeds)),
            spread(before),
            spread(after),
            f"{min(b - a for a, b in zip(before, after)):+.3f}",
            *(
                spread([getattr(point, what) for point in reached], 0) if all(reached) else "not in all seeds"
                for what in ("images", "seconds")
            ),
            f"`{settings[name]}`" if settings[name] else "those of the recipe",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean, and from the smallest to the largest."""
    mean, low, high = (f"{f(values):.{digits}f}" for f in (statistics.fmean, min, max))
    return mean if low == high else f"{mean} ({low}–{high})"


def plot(curves: dict[str, list[list[Point]]]) -> str:
    """An SVG: for each run the mean of its seeds over images, and a band from the lowest to the highest."""
    points = [point for seeds in curves.values() for curve in seeds for point in curve]
    most = max(point.images for point in points) or 1
    low, high = min(point.score for point in points) - 0.02, max(point.score for point in points) + 0.02

    def place(images: float, score: float) -> str:
        x = LEFT + images / most * (WIDTH - LEFT - RIGHT)
        return f"{x:.1f},{HEIGHT - BOTTOM - (score - low) / (high - low) * (HEIGHT - TOP - BOTTOM):.1f}"

    shapes = []
    for value in ticks(low, high):
        start, end = place(0, value), place(most, value)
        shapes.append(f'<polyline points="{start} {end}" stroke="#e3e3e3"/>')
        shapes.append(f'<text x="{LEFT - 6}" y="{start.split(",")[1]}" text-anchor="end">{value:.3g}</text>')
    for value in ticks(0, most):
        x = place(value, low).split(",")[0]
        shapes.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    middle = (WIDTH + LEFT - RIGHT) / 2
    shapes.append(
        f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">images; score on held-out words</text>'
    )
    for row, (color, (name, seeds)) in enumerate(zip(COLORS, curves.items())):
        together = list(zip(*seeds))  # the k-th evaluations of all seeds
        images = [statistics.fmean(point.images for point in step) for step in together]
        scores = [[point.score for point in step] for step in together]
        above = [place(x, max(step)) for x, step in zip(images, scores)]
        below = [place(x, min(step)) for x, step in zip(images, scores)]
        mean = [place(x, statistics.fmean(step)) for x, step in zip(images, scores)]
        shapes.append(f'<polygon points="{" ".join([*above, *below[::-1]])}" fill="{color}" opacity="0.2"/>')
        shapes.append(f'<polyline points="{" ".join(mean)}" stroke="{color}" stroke-width="2" fill="none"/>')
        y = TOP + 12 + 20 * row
        shapes.append(f'<text x="{WIDTH - RIGHT + 12}" y="{y}" fill="{color}">{escape(name)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="13">{"".join(shapes)}</svg>\n'
    )


if __name__ == "__main__":
    main()
