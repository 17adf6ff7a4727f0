"""Each tracker gets every step, on rank 0 alone; the real packages are tried by hand, since none is a
requirement.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from omnirl_hpc.checks import node_rules
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.metrics.trackers import STARTS, Trackers
from omnirl_hpc.run_directory import RunDirectory
from tests.helpers import make_config


class Recorder:
    """In place of a package: remembers what it is asked."""

    def __init__(self) -> None:
        self.calls = []

    def __getattr__(self, name):
        def call(*positional, **named):
            self.calls.append((name, positional, named))
            return self

        return call

    def named(self, name):
        return [(positional, named) for called, positional, named in self.calls if called == name]


@pytest.fixture
def packages(monkeypatch):
    made = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", made)
    monkeypatch.setitem(sys.modules, "trackio", made)
    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=made.SummaryWriter)
    )
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    return made


def use(
    tiny_model, tiny_prompts, tmp_path, *trackers: str, rank: int = 0, resume_step: int | None = None
) -> None:
    config = make_config(tiny_model, tiny_prompts, tmp_path)
    config.logging.trackers, config.checkpoint.resume_step = list(trackers), resume_step
    with Trackers(config, RunDirectory(tmp_path), rank) as opened:
        opened.log({"step": 4, "reward/mean": 0.5})
        opened.log({"step": 5, "reward/mean": 0.75})


def test_names_are_those_of_the_rules():
    assert set(STARTS) == set(node_rules.TRACKERS)


def test_tensorboard(packages, tiny_model, tiny_prompts, tmp_path):
    use(tiny_model, tiny_prompts, tmp_path, "tensorboard", resume_step=4)
    assert packages.named("SummaryWriter") == [((tmp_path / "tensorboard",), {"purge_step": 4})]
    assert packages.named("add_scalar") == [(("reward/mean", 0.5, 4), {}), (("reward/mean", 0.75, 5), {})]
    assert len(packages.named("close")) == 1


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_wandb_and_trackio(packages, tiny_model, tiny_prompts, tmp_path, tracker):
    for _ in range(2):  # a run that goes on keeps its name and tells what is new
        use(tiny_model, tiny_prompts, tmp_path, tracker)
    assert len(packages.named("log")) == 2
    (_, first), (_, second) = packages.named("init")
    assert first == second and first["resume"] == "allow" and first["config"]["actor"]["lora"]["rank"] == 4
    assert first.get("mode", "offline") == "offline"
    assert packages.named("log") == [
        (({"reward/mean": 0.5},), {"step": 4}),
        (({"reward/mean": 0.75},), {"step": 5}),
    ]
    assert len(packages.named("finish")) == 2


@pytest.mark.parametrize("tracker", sorted(STARTS))
def test_other_ranks_say_nothing(packages, tiny_model, tiny_prompts, tmp_path, tracker):
    use(tiny_model, tiny_prompts, tmp_path, tracker, rank=1)
    assert packages.calls == []


@pytest.mark.parametrize(("resume_step", "logged"), [(None, [5]), (4, [4, 5])])
def test_a_step_made_again_after_a_kill_is_not_logged_again(
    packages, tiny_model, tiny_prompts, tmp_path, resume_step, logged
):
    """Step 4 had ended. A run that is sent back makes it again in another way."""
    RunDirectory(tmp_path).note_step_tracked(4)
    use(tiny_model, tiny_prompts, tmp_path, "wandb", resume_step=resume_step)
    assert [named["step"] for _, named in packages.named("log")] == logged


def test_two_interruptions_double_nothing(packages, tiny_model, tiny_prompts, tmp_path):
    """Killed after step 9, and, gone on from step 4, after step 6:
    metrics.jsonl has no more than that then.
    """
    config = make_config(tiny_model, tiny_prompts, tmp_path)
    config.logging.trackers = ["wandb"]
    for steps in (range(10), range(4, 7), range(4, 12)):
        with Trackers(config, RunDirectory(tmp_path), rank=0) as trackers:
            for step in steps:
                trackers.log({"step": step})
    assert [named["step"] for _, named in packages.named("log")] == list(range(12))


def test_trackers_are_off_where_what_they_were_told_cannot_be_noted(
    packages, tiny_model, tiny_prompts, tmp_path, caplog
):
    config = make_config(tiny_model, tiny_prompts, tmp_path)
    config.logging.trackers = ["wandb"]
    with Trackers(config, RunDirectory(tmp_path), rank=0) as trackers:
        (tmp_path / "tracked.json").mkdir()
        for step in range(2):
            trackers.log({"step": step})
    assert packages.named("log") == []
    (record,) = caplog.records
    assert (
        "the tracker wandb failed and is off" in record.message and "tracked.json cannot be" in record.message
    )


def test_one_that_fails_is_off_and_the_others_go_on(
    packages, tiny_model, tiny_prompts, tmp_path, monkeypatch, caplog
):
    def refuse(*_, **__):
        raise TypeError("the service\nis gone")

    monkeypatch.setattr(packages, "log", refuse, raising=False)  # wandb's
    monkeypatch.setattr(packages, "finish", refuse, raising=False)
    monkeypatch.setattr(packages, "close", refuse, raising=False)  # tensorboard's, at the end of the run
    use(tiny_model, tiny_prompts, tmp_path, "wandb", "tensorboard")
    assert len(packages.named("add_scalar")) == 2
    assert [(record.levelname, record.message) for record in caplog.records] == [
        (
            "WARNING",
            f"the tracker {name} failed and is off for the rest of this run: TypeError: the service is gone; "
            f"{tmp_path / 'metrics.jsonl'} has all metrics",
        )
        for name in ("wandb", "tensorboard")
    ]


def test_one_that_does_not_start_is_an_error(packages, tiny_model, tiny_prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "init", lambda **_: {}["api key"], raising=False)
    with pytest.raises(
        ConfigError,
        match="the tracker wandb does not start: KeyError: 'api key'; drop it from logging.trackers",
    ):
        use(tiny_model, tiny_prompts, tmp_path, "wandb")
