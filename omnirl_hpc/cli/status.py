"""`omnirl-hpc status RUN`: how far a run is, from its files alone."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from omnirl_hpc.checkpoints.files import checkpoint_path, find_fault, steps_in
from omnirl_hpc.report.records import RunRecords, describe_rewards


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "omnirl-hpc status", description="How far is a run? Reads its files; the job does not notice."
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    records = RunRecords.read(parser.parse_args(arguments).run)
    for name, value in describe(records).items():
        print(f"{name:<12}{value}")


def describe(records: RunRecords) -> dict[str, str]:
    steps = "?" if records.steps is None else records.steps
    lines = {
        "run": f"{records.run.path} ({records.recipe})",
        "state": records.state,
        "step": f"{records.steps_done} of {steps}",
        "reward": describe_rewards(records),
        "speed": "-",
        "ends in": "-",
        "checkpoint": describe_checkpoint(records.run.checkpoints),
    }
    if seconds := records.seconds_a_step():
        lines["speed"] = f"{seconds:.3g} s a step, {records.metrics[-1]['images_per_second']:.3g} images/s"
        if records.running and records.steps is not None:
            lines["ends in"] = str(timedelta(seconds=round(seconds * (records.steps - records.steps_done))))
    if score := next((line for line in reversed(records.metrics) if "evaluation/adapter" in line), None):
        lines["evaluation"] = (
            f"{score['evaluation/adapter']:.6g} after step {score['step'] + 1}, base "
            f"{score['evaluation/base']:.6g}"
        )
    return lines


def describe_checkpoint(folder: Path) -> str:
    """The newest that looks whole, and what is wrong with newer ones."""
    faults: list[str] = []
    for step in reversed(steps_in(folder)):
        path = checkpoint_path(folder, step)
        fault = find_fault(path, quickly=True)
        if fault is None:
            return "; ".join([f"{path.name}{_age(path)}{_best(folder)}", *faults])
        faults.append(
            f"{path.name} {'cannot be used' if fault.unreadable else 'is not whole'}: it {fault.text}"
        )
    return "; ".join(["none", *faults])


def _age(path: Path) -> str:
    try:
        return f", {timedelta(seconds=round(time.time() - (path / 'manifest.json').stat().st_mtime))} old"
    except FileNotFoundError:  # deleted just now: the run goes on
        return ""


def _best(folder: Path) -> str:
    try:
        return f", best: {(folder / 'best').read_text()}"
    except FileNotFoundError:
        return ""
