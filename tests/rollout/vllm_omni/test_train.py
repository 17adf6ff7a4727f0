"""A whole training run with the vLLM-Omni engine, in swap and strict: equal to itself, stopped and resumed or
not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omnirl_hpc.launch.lock import find_holder

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
    run = tmp_path / "run"
    started = subprocess.Popen(command(run, tiny_model, tiny_prompts))
    end = time.monotonic() + DEADLINE
    while not (run / "checkpoints" / "step_000001").exists():
        assert time.monotonic() < end and started.poll() is None
        time.sleep(0.05)
    os.kill(find_holder(run).pid, signal.SIGKILL)  # rank 0; torchrun ends the others
    assert started.wait(timeout=DEADLINE) != 0
    assert len(metrics(run)) < STEPS
    subprocess.run(command(run, tiny_model, tiny_prompts), check=True, timeout=DEADLINE)
    subprocess.run(
        [sys.executable, "-m", "omnirl_hpc", "compare", str(whole), str(run)], check=True, timeout=DEADLINE
    )
