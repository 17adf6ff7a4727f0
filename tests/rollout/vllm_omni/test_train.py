"""A whole training run with the vLLM-Omni engine, in swap and strict: equal to itself, stopped and resumed or
not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.program import Job, compare

RANKS = 2
STEPS = 3
DEADLINE = 240.0


def command(run: Path, model: Path, prompts: Path, *overrides: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"),
        *("-m", "omnirl_hpc", "train", "recipe=flowgrpo_tiny", "rollout=vllm_omni", f"run_dir={run}"),
        *(
            f"model.path={model}",
            f"data.prompts={prompts}",
            f"steps={STEPS}",
            "residency=swap",
            "determinism=strict",
        ),
        *(
            "data.samples_per_prompt=4",
            "actor.micro_batch_size=4",
            "rollout.micro_batch_size=4",
            "checkpoint.every=1",
        ),
        *overrides,
    ]


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tiny_prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("train") / "whole"
    subprocess.run(command(run, tiny_model, tiny_prompts), check=True, timeout=DEADLINE)
    return run


def test_engine_and_actor_agree_before_every_first_update(whole: Path):
    steps = metrics(whole)
    assert len(steps) == STEPS
    assert all(step["ratio/first_update_max_abs_log"] <= 1e-6 and step["sync/bound"] == 24 for step in steps)


def test_a_replica_of_two_ranks_trains(tiny_model: Path, tiny_prompts: Path, tmp_path: Path):
    run = tmp_path / "run"
    overrides = ("rollout.tensor_parallel_size=2", "rollout.lora=merged", "steps=2")
    subprocess.run(command(run, tiny_model, tiny_prompts, *overrides), check=True, timeout=DEADLINE)
    assert all(step["ratio/first_update_max_abs_log"] <= 1e-6 for step in metrics(run))


def test_a_replica_of_two_ranks_trains_all_weights(tiny_model: Path, tiny_prompts: Path, tmp_path: Path):
    run = tmp_path / "run"
    overrides = ("actor.train=full", "rollout.tensor_parallel_size=2", "actor.optimizer.lr=1e-3", "steps=2")
    subprocess.run(command(run, tiny_model, tiny_prompts, *overrides), check=True, timeout=DEADLINE)
    assert all(
        step["ratio/first_update_max_abs_log"] <= 1e-6 and step["sync/bound"] == 77 for step in metrics(run)
    )


def test_killed_and_resumed_is_the_run_that_was_never_stopped(
    whole: Path, tiny_model: Path, tiny_prompts: Path, tmp_path: Path
):
    """Killed in the rollout of its second step, where it waits for that."""
    run, arguments = tmp_path / "run", command(tmp_path / "run", tiny_model, tiny_prompts)
    program = arguments.index("omnirl_hpc")
    arguments[program : program + 1] = ["tests.runs.inject", "pause:rollout:1:0", "--"]
    job = Job(arguments, dict(os.environ), tmp_path / "output.txt")
    try:
        job.wait_for(run / "PAUSED")
    finally:
        job.kill_everything()
    assert [step["step"] for step in metrics(run)] == [0]
    subprocess.run(command(run, tiny_model, tiny_prompts), check=True, timeout=DEADLINE)
    code, said = compare(whole, run)
    assert code == 0, said
