"""Phases of a step, on a clock that the test moves."""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.metrics import phases
from omnirl_hpc.metrics.phases import PhaseTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(phases, "time", clock)
    return clock


def test_an_inner_phase_is_not_counted_in_the_outer_one(clock):
    timer = PhaseTimer(torch.device("cpu"))
    timer.take()
    with timer.phase("rollout"):
        clock.now += 1
        with timer.phase("decode"):
            assert timer.current == "decode"
            clock.now += 10
        assert timer.current == "rollout"
        clock.now += 100
    with timer.phase("rollout"):
        clock.now += 1000
    taken = timer.take()
    assert taken["time/rollout"] == 1101 and taken["time/decode"] == 10


def test_phases_add_up_to_the_step_and_take_starts_again(clock):
    timer = PhaseTimer(torch.device("cpu"))
    clock.now += 1
    with timer.phase("actor"):
        clock.now += 2
    clock.now += 4
    assert sum(timer.take().values()) == 7
    clock.now += 8
    taken = timer.take()
    assert sum(taken.values()) == 8 and "time/actor" not in taken


def test_a_failure_leaves_the_name_of_its_phase(clock):
    timer = PhaseTimer(torch.device("cpu"))
    assert timer.current == "start-up"
    with pytest.raises(KeyError), timer.phase("sync"):
        raise KeyError
    assert timer.current == "sync"
