"""`omnirl-hpc compare RUN_A RUN_B`: are two runs equal to the bit, and if not, where do they part?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EXIT_EQUAL, EXIT_DIFFERENT, EXIT_NOT_COMPARABLE = 0, 1, 2
NOT_COMPARED = ("time/", "memory/", "images_per_second")  # measured, not computed


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "omnirl-hpc compare",
        description="Compare two runs made with determinism=strict. Exit 0: equal; 1: different, names the "
        "first difference; 2: not comparable, says why.",
    )
    parser.add_argument("runs", type=Path, nargs=2, metavar=("RUN_A", "RUN_B"))
    first, second = parser.parse_args(arguments).runs
    for reason in (_not_comparable(first), _not_comparable(second)):
        if reason:
            print(f"not comparable: {reason}", file=sys.stderr)
            sys.exit(EXIT_NOT_COMPARABLE)
    difference = find_difference(first, second)
    if difference:
        print(f"different: {difference}")
        sys.exit(EXIT_DIFFERENT)
    hashes, metrics = len(_read(first / "hashes.jsonl")), len(_read(first / "metrics.jsonl"))
    print(f"equal: {hashes} hashes and {metrics} steps of metrics")


def find_difference(first: Path, second: Path) -> str | None:
    """The first difference, by step and phase; None where there is none."""
    a, b = _keyed_hashes(first), _keyed_hashes(second)
    metrics_a, metrics_b = _read(first / "metrics.jsonl"), _read(second / "metrics.jsonl")
    for key in a:  # in the order in which the first run wrote them
        step, phase, tensor = key
        if key not in b:
            return f"step {step}, phase {phase}, tensor {tensor}: only in {first}"
        if a[key] != b[key]:
            return f"step {step}, phase {phase}, tensor {tensor}: {a[key]} and {b[key]}"
    if extra := [key for key in b if key not in a]:
        step, phase, tensor = extra[0]
        return f"step {step}, phase {phase}, tensor {tensor}: only in {second}"
    if len(metrics_a) != len(metrics_b):
        return f"{len(metrics_a)} and {len(metrics_b)} lines of metrics"
    for line_a, line_b in zip(metrics_a, metrics_b):
        for name in sorted(line_a.keys() | line_b.keys()):
            if not name.startswith(NOT_COMPARED) and not _same(line_a.get(name), line_b.get(name)):
                return f"step {line_a['step']}, metric {name}: {line_a.get(name)} and {line_b.get(name)}"
    return None


def _not_comparable(run_dir: Path) -> str | None:
    for name in ("metrics.jsonl", "hashes.jsonl"):
        if not (run_dir / name).is_file():
            hint = "; hashes are written with determinism=strict" if name == "hashes.jsonl" else ""
            return f"{run_dir / name} does not exist{hint}"
        try:
            lines = _read(run_dir / name)
        except json.JSONDecodeError as error:
            return (
                f"{run_dir / name} has a torn line ({error}): the run is still going on, or was killed; "
                "resume it first"
            )
        if not lines:
            return f"{run_dir / name} is empty"
    return None


def _keyed_hashes(run_dir: Path) -> dict[tuple[int, str, str], str]:
    return {
        (line["step"], line["phase"], line["tensor"]): line["hash"]
        for line in _read(run_dir / "hashes.jsonl")
    }


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _same(a: object, b: object) -> bool:
    return a == b or (a != a and b != b)  # NaN is what both computed
