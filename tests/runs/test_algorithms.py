"""Algorithms that are no policy gradients, as whole strict runs on two ranks: stopped in mid-step and resumed
they are, to the bit, the run that was never stopped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omnirl_hpc.checkpoints.adapters import load_adapter
from omnirl_hpc.report.records import RunRecords, describe_rewards
from tests.runs.program import Program, assert_same_run, lines
from tests.sources.cases import write_images

pytestmark = pytest.mark.slow

STRICT = ("determinism=strict", "steps=4", "checkpoint.every=2", "checkpoint.keep=10")


def straight_and_stopped(program: Program, folder: Path, *overrides: str) -> Path:
    """The folder of the straight run, after its comparison with one that was stopped between two updates of a
    step that no checkpoint precedes directly.
    """
    straight, stopped = folder / "straight", folder / "stopped"
    program.finish(straight, *STRICT, *overrides)
    ended = program.finish(stopped, *STRICT, *overrides, faults=("stop:actor:3:0",))
    assert "everything is saved" in ended.output
    assert [line["step"] for line in lines(stopped / "metrics.jsonl")] == [0, 1, 2]
    program.finish(stopped, *STRICT, *overrides)
    assert_same_run(stopped, straight)
    return straight


def adapter(run: Path, step: int, policy: str) -> dict[str, torch.Tensor]:
    return load_adapter(run / f"checkpoints/step_{step:06d}" / policy)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_diffusion_nft(tiny_model, tiny_prompts, tmp_path):
    """The old policy lags behind the current one, by its own schedule,
    and comes back when the run goes on.
    """
    program = Program(tiny_model, tiny_prompts, tmp_path, recipe="diffusionnft_tiny")
    run = straight_and_stopped(program, tmp_path, "algorithm.old_decay=delayed", "algorithm.old_every=2")
    metrics = lines(run / "metrics.jsonl")
    assert all(step["grad_norm"] > 0 and step["time/old_log_prob"] == 0 for step in metrics)
    assert not any(name.startswith("ratio/") for name in metrics[0])
    assert metrics[0]["distance/reference"] > 0  # the second update is off it
    # Steps 0 and 2 leave the old policy alone, steps 1 and 3 copy: their decay is 0 up to step 75.
    at = {(step, policy): adapter(run, step, policy) for step in (0, 2, 4) for policy in ("adapter", "old")}
    assert largest_difference(at[0, "adapter"], at[0, "old"]) == 0
    assert largest_difference(at[2, "adapter"], at[2, "old"]) == 0
    assert largest_difference(at[4, "old"], at[2, "old"]) > 0
    # In step 3 the current policy has moved away from the one that samples, which images are of.
    assert metrics[3]["distance/old"] > 0


def test_dpo(tiny_model, tmp_path):
    """Pairs of images; nothing is generated, and no reward is asked."""
    program = Program(tiny_model, write_images(tmp_path / "pairs.parquet"), tmp_path, recipe="dpo_tiny")
    run = straight_and_stopped(program, tmp_path, "algorithm.beta=2000")
    assert describe_rewards(RunRecords.read(run)) == "no reward"
    metrics = lines(run / "metrics.jsonl")
    assert not any(name.startswith(("reward/", "sync/", "ratio/")) for name in metrics[0])
    assert all(step["time/rollout"] == 0 and step["grad_norm"] > 0 for step in metrics)
    assert not list((run / "samples").glob("*.png"))
    phases = {line["phase"] for line in lines(run / "hashes.jsonl")}
    assert phases == {"pairs", "update_0", "update_1", "end"}
    first, last = adapter(run, 0, "adapter"), adapter(run, 4, "adapter")
    assert largest_difference(first, last) > 0
