"""`omnirl-hpc compare`: equal, different and where, or not comparable and why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import omnirl_hpc
from omnirl_hpc.cli.main import main

PLACES = [("rollout", "noise"), ("rollout", "images"), ("update_0", "gradients"), ("end", "adapter")]


def make_run(folder: Path, steps: int = 3, changes: dict | None = None, metrics: dict | None = None) -> Path:
    """A run directory; `changes`: (step, phase, tensor) -> hash, None for no line; `metrics`: (step, name) ->
    value.
    """
    folder.mkdir()
    hashes = {(step, *place): f"{step}-{'-'.join(place)}" for step in range(steps) for place in PLACES} | (
        changes or {}
    )
    with (folder / "hashes.jsonl").open("w") as file:
        for (step, phase, tensor), value in hashes.items():
            if value is not None:
                file.write(json.dumps({"step": step, "phase": phase, "tensor": tensor, "hash": value}) + "\n")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            line = {
                "step": step,
                "reward/mean": 0.5,
                "loss": float("nan"),
                "time/step": step,
                "memory/host_peak": 1.0,
            }
            line["images_per_second"] = 2.0
            line |= {name: value for (at, name), value in (metrics or {}).items() if at == step}
            file.write(json.dumps(line) + "\n")
    return folder


@pytest.fixture
def compare(capsys):
    def run(first: Path, second: Path) -> tuple[int, str, str]:
        code = 0
        try:
            main(["compare", str(first), str(second)])
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out.strip(), said.err.strip()

    return run


@pytest.fixture
def first(tmp_path) -> Path:
    return make_run(tmp_path / "a")


def test_equal_runs(compare, first, tmp_path):
    assert compare(first, make_run(tmp_path / "b")) == (0, "equal: 12 hashes and 3 steps of metrics", "")


def test_what_is_measured_is_not_compared(compare, first, tmp_path):
    measured = {
        (1, "time/step"): 99.0,
        (1, "time/new"): 1.0,
        (2, "memory/host_peak"): 7.0,
        (0, "images_per_second"): 1e-3,
    }
    assert compare(first, make_run(tmp_path / "b", metrics=measured))[0] == 0


@pytest.mark.parametrize(
    ("changes", "first_difference"),
    [
        ({(1, "rollout", "images"): "x"}, "step 1, phase rollout, tensor images: 1-rollout-images and x"),
        # the first of several, in the order in which a step is made
        (
            {(2, "rollout", "noise"): "x", (1, "end", "adapter"): "y", (1, "update_0", "gradients"): "z"},
            "step 1, phase update_0, tensor gradients: 1-update_0-gradients and z",
        ),
        ({(0, "rollout", "noise"): "x"}, "step 0, phase rollout, tensor noise: 0-rollout-noise and x"),
    ],
)
def test_the_first_difference_is_named(compare, first, tmp_path, changes, first_difference):
    second = make_run(tmp_path / "b", changes=changes)
    assert compare(first, second) == (1, f"different: {first_difference}", "")
    assert compare(second, first)[0] == 1


def test_a_line_that_only_one_has(compare, first, tmp_path):
    second = make_run(tmp_path / "b", changes={(1, "update_0", "gradients"): None})
    said = f"different: step 1, phase update_0, tensor gradients: only in {first}"
    assert compare(first, second) == (1, said, "")
    assert compare(second, first) == (1, said, "")


def test_a_run_that_went_further(compare, first, tmp_path):
    longer = make_run(tmp_path / "b", steps=4)
    said = f"different: step 3, phase rollout, tensor noise: only in {longer}"
    assert compare(first, longer) == compare(longer, first) == (1, said, "")


def test_metrics_count_where_hashes_are_equal(compare, first, tmp_path):
    second = make_run(tmp_path / "b", metrics={(1, "reward/mean"): 0.25, (2, "loss"): 1.0})
    assert compare(first, second) == (1, "different: step 1, metric reward/mean: 0.5 and 0.25", "")
    third = make_run(tmp_path / "c", metrics={(2, "loss"): 1.0})
    assert compare(first, third)[1] == "different: step 2, metric loss: nan and 1.0"
    fourth = make_run(tmp_path / "d", metrics={(2, "kl"): 1.0})
    assert compare(first, fourth)[1] == "different: step 2, metric kl: None and 1.0"
    (fourth / "metrics.jsonl").write_text((first / "metrics.jsonl").read_text() * 2)
    assert compare(first, fourth)[1] == "different: 3 and 6 lines of metrics"


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("hashes.jsonl", None, "hashes.jsonl does not exist; hashes are written with determinism=strict"),
        ("metrics.jsonl", None, "metrics.jsonl does not exist"),
        ("hashes.jsonl", "", "hashes.jsonl is empty"),
        ("metrics.jsonl", '{"step": 0}\n{"st', "metrics.jsonl has a torn line"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_not_comparable_and_why(compare, first, tmp_path, file, text, reason, place):
    other = make_run(tmp_path / "b")
    (other / file).unlink()
    if text is not None:
        (other / file).write_text(text)
    code, out, err = compare(*((other, first) if place == 0 else (first, other)))
    assert (code, out) == (2, "")
    assert err.startswith(f"not comparable: {other / reason}")


def test_no_run_at_all(compare, first, tmp_path):
    code, _, err = compare(first, tmp_path / "nothing")
    assert code == 2 and err == f"not comparable: {tmp_path / 'nothing' / 'metrics.jsonl'} does not exist"


def test_needs_no_torch(first):
    program = "import sys; from omnirl_hpc.cli.main import main; main(); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", program, "compare", str(first), str(first)]
    environ = {"PYTHONPATH": str(Path(omnirl_hpc.__file__).parent.parent)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environ)
    assert (result.returncode, result.stderr) == (0, "")
