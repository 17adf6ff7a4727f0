"""What is shown while a run goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from omnirl_hpc.metrics.progress import ProgressDisplay, print_choices

METRICS = {
    "step": 4,
    "reward/mean": -0.0125,
    "loss": 1e-3,
    "grad_norm": 0.5,
    "clip_fraction": 0.25,
    "time/step": 2.0,
    "images_per_second": 16.0,
}
LINE = "step    5/30  reward -0.0125  loss 0.001  grad_norm 0.5  2.0 s  16 images/s"


def test_one_plain_line_a_step_in_a_log(capsys):
    with ProgressDisplay(30, rank=0, console=Console(file=io.StringIO())) as display:
        display.show(METRICS)
        display.show(METRICS | {"step": 5})
    assert capsys.readouterr().out.splitlines() == [LINE, LINE.replace("   5/30", "   6/30")]


def test_a_bar_on_a_terminal():
    screen = io.StringIO()
    with ProgressDisplay(30, rank=0, console=Console(file=screen, force_terminal=True, width=150)) as display:
        display.show(METRICS)
    assert LINE in screen.getvalue() and "5/30" in screen.getvalue().replace(LINE, "")


@pytest.mark.parametrize("terminal", [True, False])
def test_other_ranks_are_silent(capsys, terminal):
    screen = io.StringIO()
    with ProgressDisplay(30, rank=1, console=Console(file=screen, force_terminal=terminal)) as display:
        display.show(METRICS)
    assert screen.getvalue() == capsys.readouterr().out == ""


def test_the_table_of_choices_keeps_long_values_on_one_line_in_a_log(capsys):
    print_choices({"device": "cpu", "layout": "x" * 110})
    out = capsys.readouterr().out
    assert "x" * 110 in out and "cpu" in out
