"""Small SVG charts, drawn here: a page of them opens offline and prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 62, 10, 10, 26  # margins around the plot
COLORS = (
    "#1f6fb4",
    "#e07b1a",
    "#2a9247",
    "#c23b3b",
    "#7d5ab5",
    "#8a6048",
    "#c9559f",
    "#6b6b6b",
    "#a5a529",
    "#1aa3b3",
    "#34495e",
)
MOST_POINTS = 600  # of one line; more are averaged

Values = Sequence[float | None]


def line_chart(title: str, steps: Sequence[int], lines: Mapping[str, Values], note: str = "") -> str:
    """A figure with a line for each series; None is a gap. Empty where there is nothing to draw."""
    lines = {name: values for name, values in lines.items() if any(value is not None for value in values)}
    if not lines:
        return ""
    scale = _Scale(steps, [value for values in lines.values() for value in values if value is not None])
    paths = []
    for color, values in zip(COLORS, lines.values()):
        for piece in _pieces(*_thinned(steps, values)):
            points = " ".join(f"{scale.x(step):.1f},{scale.y(value):.1f}" for step, value in piece)
            if len(piece) == 1:
                x, y = points.split(",")
                paths.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{color}"/>')
            else:
                paths.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>')
    return _figure(title, note, scale, paths, list(lines))


def area_chart(title: str, steps: Sequence[int], areas: Mapping[str, Sequence[float]], note: str = "") -> str:
    """A figure of series on top of one another, which add up to the whole; those that are 0 throughout are
    left out.
    """
    areas = {name: values for name, values in areas.items() if any(values)}
    if not areas:
        return ""
    if len(steps) == 1:  # an area needs a width
        steps, areas = [steps[0], steps[0] + 1], {name: [*values, *values] for name, values in areas.items()}
    scale = _Scale(steps, [0.0, max(map(sum, zip(*areas.values())))])
    below, paths = [0.0] * len(steps), []
    for color, values in zip(COLORS, areas.values()):
        above = [b + v for b, v in zip(below, values)]
        edge = [*_points(scale, steps, above), *reversed(_points(scale, steps, below))]
        paths.append(f'<polygon points="{" ".join(edge)}" fill="{color}"/>')
        below = above
    return _figure(title, note, scale, paths, list(areas))


class _Scale:
    """Steps and values to places in the picture, with room for ticks at round values."""

    def __init__(self, steps: Sequence[int], values: Sequence[float]) -> None:
        self.first, self.last = min(steps), max(max(steps), min(steps) + 1)
        low, high = min(values), max(values)
        margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        self.low, self.high = (low if low == 0 else low - margin), high + margin

    def x(self, step: float) -> float:
        return LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values in [low, high]."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
    return [i * distance for i in range(math.ceil(low / distance), math.floor(high / distance) + 1)]


def _thinned(steps: Sequence[int], values: Values) -> tuple[list[float], list[float | None]]:
    """At most MOST_POINTS points: means of neighbours."""
    size = -(-len(steps) // MOST_POINTS)
    if size <= 1:
        return list(steps), list(values)
    kept_steps: list[float] = []
    kept: list[float | None] = []
    for start in range(0, len(steps), size):
        known = [value for value in values[start : start + size] if value is not None]
        kept_steps.append(sum(steps[start : start + size]) / len(steps[start : start + size]))
        kept.append(sum(known) / len(known) if known else None)
    return kept_steps, kept


def _pieces(steps: Sequence[float], values: Values) -> list[list[tuple[float, float]]]:
    """The line between gaps. Where most values are missing, as those of evaluations are, the rest is one
    line.
    """
    known = [(step, value) for step, value in zip(steps, values) if value is not None]
    if 2 * len(known) <= len(values):
        return [known]
    pieces: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(steps, values):
        if value is not None:
            pieces[-1].append((step, value))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _points(scale: _Scale, steps: Sequence[int], values: Sequence[float]) -> list[str]:
    thinned = zip(*_thinned(steps, values))
    return [f"{scale.x(step):.1f},{scale.y(value):.1f}" for step, value in thinned if value is not None]


def _figure(title: str, note: str, scale: _Scale, paths: list[str], names: list[str]) -> str:
    marks = []
    values = ticks(scale.low, scale.high)
    for value, label in zip(values, _labels(values)):
        y = scale.y(value)
        marks.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for step in sorted({round(step) for step in ticks(scale.first, scale.last, 6)}):
        marks.append(f'<text x="{scale.x(step):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{step}</text>')
    legend = ""
    if len(names) > 1:
        entries = (
            f'<span><i style="background:{color}"></i>{escape(name)}</span>'
            for color, name in zip(COLORS, names)
        )
        legend = f'<div class="legend">{"".join(entries)}</div>'
    note = f" <small>{escape(note)}</small>" if note else ""
    return (
        f"<figure><figcaption>{escape(title)}{note}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">'
        f'<g class="axes">{"".join(marks)}</g>{"".join(paths)}</svg>{legend}</figure>'
    )


def _labels(values: Sequence[float]) -> list[str]:
    """As short as can be, but no two the same: a ratio stays near 1 to many digits."""
    for digits in range(3, 17):
        labels = [f"{value:.{digits}g}" for value in values]
        if len(set(labels)) == len(values):
            break
    return labels
