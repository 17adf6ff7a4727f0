"""Several rewards at once, each in workers of its own."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from omnirl_hpc.config.schema import RewardConfig, RewardPartConfig
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.rewards.mix import RewardMix
from omnirl_hpc.rewards.reward import RewardBatch
from tests.helpers import CPU
from tests.rewards.scripted import FixedConfig

PARTS = {
    "scripted": RewardPartConfig("tests.rewards.scripted:Scripted", timeout_seconds=60.0),
    "fixed": FixedConfig("tests.rewards.scripted:Fixed", timeout_seconds=60.0, value=0.25),
}


@pytest.fixture
def mix():
    mix = RewardMix(RewardConfig(PARTS), CPU)
    yield mix
    mix.close()


def batch(order: str) -> RewardBatch:
    return RewardBatch(
        torch.zeros(2, 1, 4, 4, 3, dtype=torch.uint8), [Prompt(str(i), order) for i in range(2)]
    )


def test_every_part_scores_every_sample_with_its_own_settings(mix):
    for order in ("1 2", "3 4"):
        mix.submit(batch(order))
    scores = mix.collect()
    assert {name: part.values for name, part in scores.items()} == {
        "scripted": [1, 2, 3, 4],
        "fixed": [0.25] * 4,
    }


def test_a_part_that_fails_leaves_the_others(mix):
    mix.submit(batch("raise"))
    scores = mix.collect()
    assert scores["scripted"].errors == ["LookupError: no such image (scripted.py, line 25)"]
    assert scores["fixed"].values == [0.25] * 2 and scores["fixed"].errors == []


def test_close_ends_all_workers():
    others = set(multiprocessing.active_children())  # of tests before this one
    mix = RewardMix(RewardConfig(PARTS), CPU)
    mix.submit(batch("1 2"))
    mix.collect()
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    mix.close()
    for worker in workers:
        worker.join(timeout=30)
    assert all(worker.exitcode is not None for worker in workers)
