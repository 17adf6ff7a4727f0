"""Threads of the rank with rewards that score, fail and hang."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.errors import RewardError
from omnirl_hpc.rewards.threads import ThreadRunner
from tests.rewards.test_processes import batch


@pytest.fixture
def make_runner():
    runners = []

    def make(reward: str = "Scripted", workers: int = 1, seconds: float = 20.0) -> ThreadRunner:
        name = f"tests.rewards.scripted:{reward}"
        runners.append(ThreadRunner("threaded", RewardPartConfig(name, 1.0, workers, seconds)))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


@pytest.mark.parametrize("workers", [1, 3])
def test_scores_come_in_the_order_of_submission_and_failed_calls_are_nan(make_runner, workers):
    runner = make_runner(workers=workers)
    runner.wait_until_made()
    for order in ("1 2", "raise", "3 nan"):
        runner.submit(batch(order))
    scores = runner.collect()
    assert scores.values == pytest.approx([1, 2, math.nan, math.nan, 3, math.nan], nan_ok=True)
    assert scores.errors == ["LookupError: no such image (scripted.py, line 25)"]
    assert runner.collect().values == []


def test_threads_wait_side_by_side(make_runner):
    """Each of two calls waits until the other has begun."""
    runner = make_runner("MeetsAnother", workers=2)
    for _ in range(2):
        runner.submit(batch("", size=1))
    assert runner.collect().values == [1, 1]


@pytest.mark.parametrize(
    ("reward", "why"), [("CannotBeMade", "RuntimeError: no weights"), ("LeavesWhenMade", "SystemExit: 0")]
)
def test_a_reward_that_cannot_be_made_is_an_error_that_names_it(make_runner, reward, why):
    with pytest.raises(RewardError, match=f"^reward threaded could not be made: {why} "):
        make_runner(reward, workers=2).wait_until_made()


def test_a_hang_ends_at_the_deadline(make_runner):
    runner = make_runner(seconds=0.2)
    runner.submit(batch("hang"))
    with pytest.raises(RewardError, match="reward threaded did not score 1 of 1 micro-batches within 0 s"):
        runner.collect()


def test_a_thread_that_hangs_does_not_keep_the_program():
    program = (
        "from omnirl_hpc.config.schema import RewardPartConfig\n"
        "from omnirl_hpc.rewards.threads import ThreadRunner\n"
        "runner = ThreadRunner('t', RewardPartConfig('tests.rewards.scripted:HangsWhenMade'))\n"
        "runner.close()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
