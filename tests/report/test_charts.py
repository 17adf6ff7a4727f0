"""Curves: the right shape in the right place, gaps, and numbers that a reader can take in."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from omnirl_hpc.report.charts import MOST_POINTS, area_chart, line_chart, ticks


def parsed(figure: str) -> ElementTree.Element:
    return ElementTree.fromstring(figure)  # raises where it is not well-formed


def polylines(figure: str) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in parsed(figure).iter()
        if line.tag in ("polyline", "polygon")
    ]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-3, 7, [-2, 0, 2, 4, 6]),
        (1e-6, 1.1e-6, [1e-6, 1.02e-6, 1.04e-6, 1.06e-6, 1.08e-6, 1.1e-6]),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    "values", [[0.99999998, 1.0, 1.00000002], [1e-9, 3e-9], [0.5, 0.75], [12_000.0, 90_000.0]]
)
def test_no_two_ticks_have_the_same_label(values):
    texts = [
        text
        for text in parsed(line_chart("t", [0, 1, 2], {"x": values})).iter("text")
        if "text-anchor" in text.attrib
    ]
    labels = [text.text for text in texts if text.attrib["text-anchor"] == "end"]
    assert len(labels) == len(set(labels)) > 2
    assert max(map(len, labels)) <= 11


def test_a_line_rises_where_its_values_do():
    (line,) = polylines(line_chart("a < b & c", [0, 1, 2], {"x": [1.0, 2.0, 4.0]}))
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y2 < y1 < y0  # y of a picture points down
    assert y1 - y2 == pytest.approx(2 * (y0 - y1), abs=0.3)


def test_a_gap_is_a_gap_and_rare_values_are_joined():
    gap = line_chart("t", [0, 1, 2, 3, 4], {"x": [1.0, 2.0, None, 2.0, 1.0]})
    assert [len(line) for line in polylines(gap)] == [2, 2]
    rare = line_chart("t", list(range(6)), {"x": [None, 1.0, None, None, 2.0, None]})
    assert [len(line) for line in polylines(rare)] == [2]
    assert "<circle" in line_chart("t", [0], {"x": [1.0]})


def test_nothing_to_draw_is_nothing():
    assert line_chart("t", [0, 1], {"x": [None, None]}) == "" == area_chart("t", [0, 1], {"x": [0.0, 0.0]})


@pytest.mark.parametrize("values", [[5.0, 5.0], [0.0, 0.0], [-1e-9, 1e9], [3.0]])
def test_any_values_give_a_picture_with_finite_numbers(values):
    figure = line_chart("t", list(range(len(values))), {"x": values})
    parsed(figure)
    assert not re.search("nan|inf", figure)


def test_areas_stand_on_one_another():
    lower, upper = polylines(area_chart("t", [0, 1], {"a": [1.0, 1.0], "none": [0.0, 0.0], "b": [2.0, 2.0]}))
    assert lower[0][1] == upper[-1][1]  # the upper one's foot is the lower one's top
    assert 2 * (lower[-1][1] - lower[0][1]) == pytest.approx(upper[-1][1] - upper[0][1], abs=0.3)
    (alone,) = polylines(area_chart("t", [7], {"a": [1.0]}))  # of one step: a strip all the same
    assert len({x for x, _ in alone}) > 1 and len({y for _, y in alone}) == 2


def test_a_long_run_is_thinned_to_means():
    steps = list(range(10 * MOST_POINTS))
    (line,) = polylines(line_chart("t", steps, {"x": [float(step % 2) for step in steps]}))
    assert len(line) == MOST_POINTS and len({y for _, y in line}) == 1  # each point is the mean of ten
