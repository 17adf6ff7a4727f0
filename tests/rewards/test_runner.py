"""The reward runner with rewards that score, fail, hang and die."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal

import numpy as np
import pytest

from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.errors import RewardError
from omnirl_hpc.rewards.reward import RewardBatch
from omnirl_hpc.rewards.runner import RewardRunner


def batch(order: str, size: int = 2) -> RewardBatch:
    return RewardBatch(np.zeros((size, 1, 4, 4, 3), np.uint8), [Prompt(str(i), order) for i in range(size)])


@pytest.fixture
def make_runner():
    runners = []

    def make(reward="Scripted") -> RewardRunner:
        runners.append(
            RewardRunner(
                "scripted", RewardPartConfig(f"tests.rewards.scripted:{reward}", timeout_seconds=60.0)
            )
        )
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture(scope="module")
def runner():
    """One runner for the tests that leave its worker alive."""
    runner = RewardRunner(
        "scripted", RewardPartConfig("tests.rewards.scripted:Scripted", timeout_seconds=60.0)
    )
    yield runner
    runner.close()


def test_scores_come_in_the_order_of_submission(runner):
    for order in ("1 2", "3 4", "5 6"):
        runner.submit(batch(order))
    scores = runner.collect()
    assert scores.values == [1, 2, 3, 4, 5, 6]
    assert scores.errors == [] and scores.seconds > 0


def test_collecting_starts_again(runner):
    runner.submit(batch("1 2"))
    runner.collect()
    assert runner.collect().values == []
    runner.submit(batch("7 8"))
    assert runner.collect().values == [7, 8]


def test_scores_are_made_in_other_processes(runner):
    runner.submit(batch("pid", size=1))
    assert runner.collect().values != [os.getpid()]


@pytest.mark.parametrize(
    ("order", "error"),
    [
        ("raise", "LookupError: no such image (scripted.py, line 20)"),
        ("text", "ValueError: could not convert string to float: 'high'"),
        ("1 2 3", "returned 3 scores for 2 samples"),
    ],
)
def test_a_failing_call_is_nan_and_the_others_are_kept(runner, order, error):
    for each in ("1 2", order, "3 4"):
        runner.submit(batch(each))
    scores = runner.collect()
    assert scores.values == pytest.approx([1, 2, math.nan, math.nan, 3, 4], nan_ok=True)
    assert scores.errors == [error]


def test_a_score_that_is_not_finite_is_nan_alone(runner):
    runner.submit(batch("1 nan inf -inf", size=4))
    scores = runner.collect()
    assert scores.values == pytest.approx([1, math.nan, math.nan, math.nan], nan_ok=True)
    assert scores.errors == []


def test_a_hang_ends_at_the_deadline_and_so_does_its_worker(make_runner):
    runner = make_runner()
    runner.submit(batch("pid", size=1))
    pid = runner.collect().values[0]
    (worker,) = (process for process in multiprocessing.active_children() if process.pid == pid)
    runner._settings.timeout_seconds = (
        0.5  # only now that the worker runs: starting takes seconds on a busy machine
    )
    runner.submit(batch("hang"))
    runner.submit(batch("1 2"))
    with pytest.raises(
        RewardError,
        match=r"reward scripted did not score 2 of 2 micro-batches within 1 s \(reward.parts.scripted.timeout_seconds",
    ):
        runner.collect()
    worker.join(timeout=30)
    assert worker.exitcode is not None  # or Python would wait for it at exit, for ever


def test_signals_of_the_job_do_not_end_a_worker_not_even_one_that_starts(make_runner):
    runner = make_runner()
    runner.submit(batch("pid", size=1))
    (worker,) = runner._pool._processes  # a moment old: it has not imported anything yet
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(worker, number)
    assert runner.collect().values == [worker]
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(worker, number)
    runner.submit(batch("pid", size=1))
    assert runner.collect().values == [worker]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()  # nothing stays blocked in the rank itself


def test_a_killed_worker_is_an_error_that_names_the_reward(make_runner):
    runner = make_runner()
    runner.submit(batch("1 2"))
    runner.submit(batch("die"))
    with pytest.raises(RewardError, match="a worker process of reward scripted ended"):
        runner.collect()
    with pytest.raises(RewardError, match="a worker process of reward scripted ended"):
        runner.submit(batch("1 2"))


def test_a_reward_that_cannot_be_made_is_an_error_that_names_it(make_runner):
    runner = make_runner("CannotBeMade")
    runner.submit(batch("1 2"))
    with pytest.raises(RewardError, match="a worker process of reward scripted ended"):
        runner.collect()
