"""What goes wrong in a run is found, named, and costs no more than the step it happened in."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from omnirl_hpc.checkpoints.files import find_fault
from omnirl_hpc.launch.lock import find_holder
from tests.runs.program import go_on, lines

pytestmark = pytest.mark.slow

UNRELIABLE = "reward=tests.runs.rewards:Unreliable"


def test_a_reward_that_raises_or_gives_nan_is_counted_and_masked(program, tmp_path):
    """Step 0: one of two calls raises. Step 1: one sample is NaN."""
    allowed = "reward.max_failed_fraction=0.5"
    program.finish(tmp_path / "run", UNRELIABLE, allowed, "steps=2", "logging.samples_every=1", ranks=1)
    metrics = lines(tmp_path / "run/metrics.jsonl")
    assert [line["reward/failed"] for line in metrics] == [4, 1]
    scores = [
        [s["reward"] for s in lines(tmp_path / "run/samples/index.jsonl") if s["step"] == step]
        for step in (0, 1)
    ]
    assert scores[0][:4] == [None] * 4 and None not in scores[0][4:]
    assert scores[1][0] is None and None not in scores[1][1:]  # never a zero
    for line, given in zip(metrics, scores):
        valid = [score for score in given if score is not None]
        assert line["reward/mean"] == pytest.approx(sum(valid) / len(valid))
    log = (tmp_path / "run/log/rank_0.log").read_text()
    assert "reward Unreliable failed: OSError: the scorer is out of paper" in log


def test_too_many_failures_stop_the_run_and_name_the_reward(program, tmp_path):
    ended = program.run(tmp_path / "run", UNRELIABLE, "reward.max_failed_fraction=0.25", "steps=2", ranks=1)
    assert ended.code == 1
    last = ended.output.splitlines()[-1]
    assert "reward Unreliable gave no finite score for 4 of 8 samples" in last
    assert "reward.max_failed_fraction=0.25" in last and "the scorer is out of paper" in last
    assert "Traceback" not in ended.output


def test_a_gradient_that_is_nan_stops_the_run_before_it_is_applied(program, tmp_path):
    ended = program.run(tmp_path / "run", "checkpoint.every=1", "steps=3", ranks=1, faults=("nan:actor:1:0",))
    assert ended.code == 1
    assert (
        "phase actor: the gradient norm is nan: the update was not applied" in ended.output.splitlines()[-1]
    )
    assert "Traceback" not in ended.output
    checkpoints = tmp_path / "run/checkpoints"
    assert (checkpoints / "latest").read_text() == "step_000001"
    assert [find_fault(checkpoints / f"step_00000{n}") for n in (0, 1)] == [None, None]
    program.finish(tmp_path / "run", "checkpoint.every=1", "steps=2", ranks=1)
    assert [line["step"] for line in lines(tmp_path / "run/metrics.jsonl")] == [0, 1]


def test_a_run_that_was_replaced_while_it_was_frozen_writes_nothing_more(program, tmp_path):
    run = tmp_path / "run"

    def files() -> dict[Path, bytes]:
        return {
            path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "PAUSED"
        }

    options = ("steps=2", "checkpoint.every=1", "determinism=strict", "logging.samples_every=1")
    with program.start(run, *options, ranks=1, faults=("pause:rollout:1:0",)) as job:
        job.wait_for(run / "PAUSED")
        holder = find_holder(run)
        (run / "lock" / f"{holder.token}.json").unlink()  # as who has found it silent does
        other = replace(holder, token="other", job="slurm job 8", host="node9")
        (run / "lock" / "other.json").write_text(json.dumps(asdict(other)))
        before = files()
        go_on(run)
        ended = job.wait()
    assert ended.code == 1
    last = ended.output.splitlines()[-1]
    assert f"run_dir={run} was taken over by slurm job 8 (process {holder.pid} on node9): " in last, (
        ended.output
    )
    assert "Traceback" not in ended.output
    assert files() == before


def test_a_full_disk_is_found_before_the_first_step(program, small_disk):
    ended = program.run(small_disk(kib=256) / "run", "steps=2")
    assert ended.code == 1
    (said,) = [line for line in ended.output.splitlines() if line.startswith("omnirl-hpc train: ")]
    assert said.startswith("omnirl-hpc train: preflight: run_dir: ") and " are free in run_dir=" in said
    assert "2 checkpoints need" in said and "make room" in said
    assert "step    1/2" not in ended.output


def test_host_memory_does_not_grow(program, tmp_path):
    """50 steps, a checkpoint after every fifth, hashes. The slope of resident memory over the last 30 steps,
    by least squares.

    The bound is generous, since allocators settle slowly (0.05 to 0.15 MiB a step here, and less later). A
    host copy of the tiny model's transformer that were kept at each swap would be 1 MiB a step.
    """
    smaller = (
        "data.prompts_per_step=2",
        "sampling.true_cfg_scale=1",
        "checkpoint.every=5",
        "determinism=strict",
    )
    program.finish(tmp_path / "run", "steps=50", *smaller, ranks=1, faults=("memory",))
    resident = np.loadtxt(tmp_path / "run/resident") / 2**20
    assert len(resident) == 50
    slope, _ = np.polyfit(np.arange(30), resident[20:], 1)
    assert slope < 0.5, resident  # MiB a step
