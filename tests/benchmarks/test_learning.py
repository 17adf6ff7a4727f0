"""The table and the plot of learning curves, from the files of runs."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from benchmarks.learning import Point, plot, read_curve, table


def write_run(folder, scores):
    """Steps of 64 images in 3 s, and an evaluation of 2 s and a checkpoint of 1 s after every second step."""
    lines = []
    for step in range(2 * len(scores)):
        due = step % 2 == 1
        times = {"time/evaluation": 2.0 * due, "time/checkpoint": 1.0 * due, "time/step": 3.0 + 3 * due}
        line = {"step": step, **times, "images_per_second": 64 / times["time/step"]}
        if due:
            line |= {"evaluation/base": 0.4, "evaluation/adapter": scores[step // 2]}
        lines.append(json.dumps(line) + "\n")
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_a_curve_begins_with_the_base_and_leaves_out_evaluations(tmp_path):
    write_run(tmp_path / "run", [0.5, 0.7])
    assert list(read_curve(tmp_path / "run")) == [
        Point(0, 0.0, 0.4),
        Point(128, 6.0, 0.5),
        Point(256, 12.0, 0.7),
    ]


CURVES = {
    "a": [
        [Point(0, 0, 0.4), Point(128, 6, 0.5), Point(256, 12, 0.7)],
        [Point(0, 0, 0.4), Point(128, 6, 0.6), Point(256, 12, 0.8)],
    ],
    "<b>": [[Point(0, 0, 0.4), Point(128, 6, 0.3), Point(256, 12, 0.45)]],
}


def test_the_table_tells_gains_and_when_a_score_was_reached():
    head, _, first, second = table(CURVES, {"a": "", "<b>": "sampling=cps"}, score=0.6).splitlines()
    assert head.startswith("| run | seeds | before | after | smallest gain | images to 0.6 | seconds to 0.6")
    assert first.split(" | ")[1:] == [
        "2",
        "0.400",
        "0.750 (0.700–0.800)",
        "+0.300",
        "192 (128–256)",
        "9 (6–12)",
        "those of the recipe |",
    ]
    assert "not in all seeds" in second and "`sampling=cps`" in second


def test_the_plot_is_a_picture_with_a_line_and_a_band_for_each_run():
    picture = ElementTree.fromstring(plot(CURVES))
    kinds = [element.tag.split("}")[1] for element in picture]
    assert kinds.count("polygon") == 2
    assert "<b>" in [element.text for element in picture]
