"""What a run remembers comes back: every part of it, and from nothing that is not whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from omnirl_hpc.actor.fsdp import FSDPActor
from omnirl_hpc.checkpoints import checkpointer as checkpoint_module
from omnirl_hpc.checkpoints.checkpointer import Checkpointer
from omnirl_hpc.checkpoints.files import find_fault
from omnirl_hpc.checkpoints.run_state import RunState, find_start
from omnirl_hpc.errors import ConfigError, ResumeError
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.policies import CURRENT, EMA, OLD, Blend
from omnirl_hpc.run_directory import RunDirectory
from omnirl_hpc.sampling.noise import standard_normal
from omnirl_hpc.sources.rollout import RolloutSource
from omnirl_hpc.sources.source import fingerprint
from tests.helpers import ALONE, CPU, load_small, one_rank_group

POLICIES = (CURRENT, OLD, EMA)


@pytest.fixture(scope="module", autouse=True)
def group():
    with one_rank_group():
        yield


class Job:
    """What one job of a run has: made anew from its settings, and then restored from the run's folder."""

    def __init__(self, tiny_model, prompts, run_dir, *overrides: str) -> None:
        settings = (
            "actor.ema_decay=0.9",
            "actor.optimizer.warmup_updates=8",
            "steps=100",
            "checkpoint.every=50",
        )
        loaded = load_small(tiny_model, prompts, run_dir, *settings, *overrides)
        config, self.run = loaded.config, RunDirectory(run_dir)
        self.run.create()
        self.actor = FSDPActor(config, QwenImage(config.model), ALONE, CPU, (OLD, EMA))
        self.algorithm, self.engine = Remembering(), SimpleNamespace(micro_batch_size=2)
        self.source = RolloutSource(
            config,
            QwenImage(config.model),
            ALONE,
            CPU,
            self.algorithm,
            SimpleNamespace(engine=self.engine),
            PhaseTimer(CPU),
            None,
            self.run,
        )
        self.sampler = self.source._sampler
        residency = SimpleNamespace(give_to=lambda side: None)
        checkpointer = Checkpointer(self.run.checkpoints, config.checkpoint, rank=0, timeout_seconds=60.0)
        self.start = find_start(self.run, checkpointer)
        self.state = RunState(
            loaded,
            self.run,
            checkpointer,
            self.actor,
            self.algorithm,
            self.source,
            residency,
            PhaseTimer(CPU),
        )

    def restore(self) -> int:
        return self.state.restore(self.start)

    def update(self) -> tuple[float, float]:
        """One optimizer step with gradients of their own: (gradient norm, learning rate)."""
        for name, parameter in self.actor._parameters.items():
            gradient = standard_normal(parameter.shape, 0, name)
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.to_local().copy_(gradient)
        result = self.actor.apply_gradients()
        self.actor.blend(Blend(EMA, 0.9))
        self.actor.blend(Blend(OLD, 0.5))
        return result

    def tensors(self) -> dict[str, torch.Tensor]:
        """The adapters of all policies and the optimizer's state, by name."""
        adapters = {
            f"{policy} {name}": t.clone() for policy in POLICIES for name, t in self.actor.weights(policy)
        }
        return {
            **adapters,
            **{f"optimizer {name}": tensor.clone() for name, tensor in self.actor.full_optimizer_state()},
        }


class Remembering:
    """An algorithm with a state."""

    seen = 0
    given: dict[str, str] = {}

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


@pytest.fixture
def job(tiny_model, tiny_prompts, tmp_path):
    """A job of the one run in this test's folder."""

    def make(*overrides: str, prompts=tiny_prompts) -> Job:
        return Job(tiny_model, prompts, tmp_path / "run", *overrides)

    return make


def test_everything_comes_back(job):
    first = job()
    assert first.restore() == 0
    rates = [first.update()[1] for _ in range(3)]
    first.engine.micro_batch_size, first.sampler.cursor, first.algorithm.seen = 1, 12, 3
    first.state.judge(3, 0.5, "a measure")
    first.state.save_if_due(3)
    saved = first.tensors()

    second = job()
    assert second.restore() == 3
    loaded = second.tensors()
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[name], saved[name]) for name in saved)
    for name in (name.removeprefix("current ") for name in loaded if name.startswith("current ")):
        current, old, mean = (loaded[f"{policy} {name}"] for policy in POLICIES)  # no two are the same file's
        assert not (torch.equal(current, old) or torch.equal(current, mean) or torch.equal(old, mean))
    assert second.engine.micro_batch_size == 1  # what fitted into memory
    assert second.sampler.cursor == 12
    assert second.algorithm.seen == 3
    assert second.update() == first.update()
    assert len({*rates, second.actor.scheduler_state()["_last_lr"][0]}) == 4  # the rate is still rising
    second.state.judge(4, 0.4, "a measure")
    second.state.save_if_due(4)  # worse than the best, which is remembered
    assert find_fault(second.run.checkpoints / "step_000004").text == "does not exist"


def test_the_best_one_is_saved_though_none_is_due(job):
    first = job()
    first.restore()
    first.state.judge(1, 0.5, "a measure")
    first.state.save_if_due(1)
    first.state.judge(2, 0.4, "a measure")
    first.state.save_if_due(2)
    checkpoints = first.run.checkpoints
    assert sorted(path.name for path in checkpoints.glob("step_*")) == ["step_000000", "step_000001"]
    assert (checkpoints / "best").read_text() == "step_000001"


@pytest.mark.parametrize("end", ["give_up", "finish"])
def test_the_end_of_a_job_waits_for_a_save_in_the_background(job, monkeypatch, end):
    first = job("checkpoint.asynchronous=true", "checkpoint.every=1")
    first.restore()
    first.state.finish()
    save = checkpoint_module.save_adapter
    monkeypatch.setattr(checkpoint_module, "save_adapter", lambda *a: time.sleep(0.5) or save(*a))
    if end == "give_up":
        first.state.trained(1, {"step": 0})
        first.state.give_up()
    else:
        first.state.save_if_due(1)
        first.state.finish()
    assert find_fault(first.run.checkpoints / "step_000001") is None


def test_another_table_is_refused(job, tiny_prompts, tmp_path):
    job().restore()
    shutil.copy(tiny_prompts, tmp_path / "moved.parquet")
    assert job(prompts=tmp_path / "moved.parquet").restore() == 0
    pq.write_table(pa.table({"prompt": ["a cat"] * 16, "target": ["cat"] * 16}), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match=r"other.parquet is not the table that the run was started with"):
        job(prompts=tmp_path / "other.parquet").restore()


@pytest.mark.parametrize("place", [0, -1])
def test_a_fingerprint_tells_files_of_one_size_apart(tmp_path, place):
    """Of a large one its ends are read."""
    data = bytearray(3 << 20)
    (tmp_path / "table").write_bytes(data)
    before = fingerprint(str(tmp_path / "table"))
    data[place] = 1
    (tmp_path / "table").write_bytes(data)
    assert fingerprint(str(tmp_path / "table")) != before
    (tmp_path / "longer").write_bytes(bytes(3 << 20) + b"\0")
    assert fingerprint(str(tmp_path / "longer")) != before


# ------------------------------------------------------------------ where a run starts


def start(run: RunDirectory):
    from omnirl_hpc.config.schema import CheckpointConfig

    return find_start(run, Checkpointer(run.checkpoints, CheckpointConfig(), rank=0, timeout_seconds=60.0))


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.create()
    return made


def files(run: RunDirectory) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_a_new_folder_is_a_start(run):
    run.metrics.touch()  # a job that was killed before its first step
    assert start(run) is None


@pytest.mark.parametrize("left", ["metrics", "torn", "torn and a save"])
def test_a_run_without_a_whole_checkpoint_does_not_start_over(run, left):
    if left == "metrics":
        run.append_metrics({"step": 0, "loss": 0.5})
        said = f"{run.checkpoints} has no checkpoint, and {run.metrics} has the metrics of a run"
    else:
        folder = run.checkpoints / "step_000002"
        folder.mkdir()
        (folder / "manifest.json").write_text(json.dumps({"state.json": [99, 0]}))
        (folder / "state.json").write_text("{")
        said = "has no whole checkpoint (step_000002 has 1 of 99 bytes of state.json, says rank 0 on "
    if left == "torn and a save":
        (run.checkpoints / "step_000003.tmp").mkdir()
        (run.checkpoints / "step_000003.tmp/state.json").write_text("{}")
    before = files(run)
    with pytest.raises(ResumeError) as refused:
        start(run)
    assert refused.value.exit_code == 2
    assert str(refused.value).startswith(f"run_dir={run.path} holds a run that cannot go on: ")
    assert said in str(refused.value) and str(refused.value).endswith("or take another run_dir")
    assert files(run) == before


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_metrics_that_cannot_be_read_are_not_none(run, monkeypatch, number):
    run.append_metrics({"step": 0})

    def refuse(self, *_, **__):
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(
        ResumeError, match=f"metrics.jsonl cannot be read .{os.strerror(number)}.; nothing was changed"
    ):
        start(run)


def test_a_job_that_went_back_is_known(job, monkeypatch):
    """And one that was killed before it did is not."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    first = job("checkpoint.every=1")
    first.restore()
    first.state.save_if_due(1)
    again = job("checkpoint.resume_step=0")
    assert not again.run.has_returned("77", 0)
    assert again.restore() == 0
    assert again.run.has_returned("77", 0)
    assert not again.run.has_returned("78", 0) and not again.run.has_returned("77", 1)
