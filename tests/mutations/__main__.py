"""Put deliberate faults into a copy of the project, one at a time, and see whether the tests notice.

    python -m tests.mutations [--list] [PART …]     # all faults, or those whose description holds a PART

Run before a release, not in CI: each fault takes a run of the tests that should catch it, an hour or two
together. Exit code 0: all are caught; 1: one is not, or its tests fail without it, too; 2: the list is out of
date, see faults.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutations.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
PARTS = ("omnirl_hpc", "tests", "configs", "sbatch", "pyproject.toml", "README.md", "docs", "Makefile")
PASSED, FAILED = 0, 1  # pytest's exit codes; others say that it could not run the tests
DEADLINE = 1800.0  # seconds: a fault may make a test hang, which is one way to notice it


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("parts", nargs="*", help="only faults whose description holds one of these")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    options = parser.parse_args(arguments)
    chosen = [f for f in FAULTS if not options.parts or any(part in str(f) for part in options.parts)]
    if stale := [problem for fault in chosen if (problem := fault.problem(ROOT))]:
        print("\n".join(stale))
        return 2
    if options.list or not chosen:
        print("\n".join(map(str, chosen)) or "no fault is described like that")
        return 0 if chosen else 2
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_project(Path(folder))
        if run_tests(copy, sorted({test for fault in chosen for test in fault.tests})) != PASSED:
            print("the tests fail without any fault: see above")
            return 1
        missed = [fault for fault in chosen if not is_caught(fault, copy)]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults are caught", *missed, sep="\n")
    return 1 if missed else 0


def copy_project(folder: Path) -> Path:
    for name in PARTS:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / name)
    return folder


def is_caught(fault: Fault, copy: Path) -> bool:
    started, file = time.monotonic(), copy / fault.file
    whole = file.read_text()
    file.write_text(whole.replace(fault.old, fault.new))
    try:
        code = run_tests(copy, fault.tests, quiet=True)
    finally:
        file.write_text(whole)
    caught = code == FAILED or code < 0  # by a signal: memory that is not there was read
    verdict = "caught" if caught else "NOT CAUGHT" if code == PASSED else f"CANNOT TELL (pytest: {code})"
    print(f"{verdict}: {fault} ({time.monotonic() - started:.0f} s)", flush=True)
    return caught


def run_tests(copy: Path, tests: list[str] | tuple[str, ...], quiet: bool = False) -> int:
    """pytest's exit code; FAILED where it takes too long."""
    program = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environ = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(
            program, cwd=copy, env=environ, capture_output=quiet, check=False, timeout=DEADLINE
        )
    except subprocess.TimeoutExpired:
        return FAILED
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
