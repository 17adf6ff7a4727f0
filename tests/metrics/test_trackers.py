"""Each tracker gets every step, on rank 0 alone; the real packages are tried by hand, since none is a requirement."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from omnirl_hpc.config import node_rules
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
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=made.SummaryWriter))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    return made


def use(tiny_model, tiny_prompts, tmp_path, tracker: str, rank: int) -> None:
    config = make_config(tiny_model, tiny_prompts, tmp_path)
    config.logging.trackers = [tracker]
    with Trackers(config, RunDirectory(tmp_path), first_step=4, rank=rank) as trackers:
        trackers.log({"step": 4, "reward/mean": 0.5})
        trackers.log({"step": 5, "reward/mean": 0.75})


def test_names_are_those_of_the_rules():
    assert set(STARTS) == set(node_rules.TRACKERS)


def test_tensorboard(packages, tiny_model, tiny_prompts, tmp_path):
    use(tiny_model, tiny_prompts, tmp_path, "tensorboard", rank=0)
    assert packages.named("SummaryWriter") == [((tmp_path / "tensorboard",), {"purge_step": 4})]
    assert packages.named("add_scalar") == [(("reward/mean", 0.5, 4), {}), (("reward/mean", 0.75, 5), {})]
    assert len(packages.named("close")) == 1


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_wandb_and_trackio(packages, tiny_model, tiny_prompts, tmp_path, tracker):
    for _ in range(2):  # a run that goes on keeps its name
        use(tiny_model, tiny_prompts, tmp_path, tracker, rank=0)
    (_, first), (_, second) = packages.named("init")
    assert first == second and first["resume"] == "allow" and first["config"]["actor"]["lora"]["rank"] == 4
    assert first.get("mode", "offline") == "offline"
    assert packages.named("log")[:2] == [(({"reward/mean": 0.5},), {"step": 4}), (({"reward/mean": 0.75},), {"step": 5})]
    assert len(packages.named("finish")) == 2


@pytest.mark.parametrize("tracker", sorted(STARTS))
def test_other_ranks_say_nothing(packages, tiny_model, tiny_prompts, tmp_path, tracker):
    use(tiny_model, tiny_prompts, tmp_path, tracker, rank=1)
    assert packages.calls == []
