"""The states in which a run's folder can be met."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from omnirl_hpc.launch.identity import Identity
from omnirl_hpc.launch.lock import describe_this_run

ALONE = Identity("alone", 0, 0, 1)
STATES = ("finished", "running", "started", "empty", "missing", "torn")


def lock_by_this_process(run: Path, job: str) -> None:
    """As if this process were a Slurm job that holds the folder."""
    holder = describe_this_run(ALONE, {"SLURM_JOB_ID": job})
    (run / "lock").mkdir()
    (run / "lock" / f"{holder.token}.json").write_text(json.dumps(asdict(holder)))


def make_state(state: str, finished: Path, folder: Path) -> Path:
    """A folder in `folder`, made from a finished run of three steps with checkpoints 0 and 3 (or 2 and 3,
    where 2 was the best).
    """
    run = folder / state
    if state == "empty":
        run.mkdir()
    if state in ("missing", "empty"):
        return run
    shutil.copytree(finished, run)
    if state == "running":  # this process is the job; a line and a checkpoint are being written
        lock_by_this_process(run, "7")
        metrics = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text(metrics[0] + metrics[1] + metrics[2][:40])
        (run / "checkpoints/step_000003").rename(run / "checkpoints/step_000003.tmp")
    if state == "started":  # not one step, not one checkpoint
        for name in ("metrics.jsonl", "report.html"):
            (run / name).unlink()
        for name in ("checkpoints", "samples", "evaluation"):
            shutil.rmtree(run / name)
    if state == "torn":  # a disk that was full, or a job that was killed
        for name in (
            "checkpoints/step_000003/adapter/adapter_model.safetensors",
            "samples/index.jsonl",
            "metrics.jsonl",
        ):
            data = (run / name).read_bytes()
            (run / name).write_bytes(data[:-20])
        for picture in (run / "samples").glob("step_000000_*.png"):
            picture.write_bytes(picture.read_bytes()[:60])
        (run / "environment.json").write_text("{")
        (run / "evaluation/step_000003/comparison.jpg").write_bytes(b"")
    return run
