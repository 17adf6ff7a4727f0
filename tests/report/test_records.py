"""How far a run is, from what its files say."""

from __future__ import annotations

import json

import pytest

from omnirl_hpc.checkpoints.files import crc
from omnirl_hpc.report.records import RunRecords


@pytest.fixture
def run(tmp_path):
    """A run of 8 steps whose first metrics were lost; `checkpoint(step)` adds one."""
    (tmp_path / "config.yaml").write_text("steps: 8\n")
    lines = [{"step": step, "reward/mean": 0.5} for step in (3, 4)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "re'
    )

    def checkpoint(step: int, torn: bool = False) -> None:
        path = tmp_path / f"checkpoints/step_{step:06d}"
        path.mkdir(parents=True)
        (path / "state.json").write_text("{}")
        manifest = {"state.json": [2, crc(path / "state.json")]}
        (path / "manifest.json").write_text(json.dumps(manifest))
        if torn:
            (path / "state.json").write_text("")

    return tmp_path, checkpoint


def test_steps_are_counted_by_number_and_not_by_line(run):
    assert RunRecords.read(run[0]).steps_done == 5


def test_a_stop_in_an_evaluation_is_not_a_step_short(run):
    """The step that was to be evaluated is done and saved, and has no metrics yet."""
    folder, checkpoint = run
    checkpoint(6)
    checkpoint(7, torn=True)
    records = RunRecords.read(folder)
    assert (records.steps_reported, records.steps_done, records.finished) == (5, 6, False)


def test_a_run_whose_last_evaluation_is_to_be_made_is_not_finished(run):
    folder, checkpoint = run
    checkpoint(8)
    assert (RunRecords.read(folder).steps_done, RunRecords.read(folder).finished) == (8, False)
