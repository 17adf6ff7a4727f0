"""Worker processes with rewards that score, fail, hang and die."""

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
from omnirl_hpc.rewards.processes import ProcessRunner, _exit_code
from omnirl_hpc.rewards.reward import RewardBatch


def batch(order: str, size: int = 2) -> RewardBatch:
    return RewardBatch(np.zeros((size, 1, 4, 4, 3), np.uint8), [Prompt(str(i), order) for i in range(size)])


@pytest.fixture
def make_runner():
    runners = []

    def make(reward="Scripted", workers: int = 1, seconds: float = 120.0) -> ProcessRunner:
        name = f"tests.rewards.scripted:{reward}"
        runners.append(
            ProcessRunner("scripted", RewardPartConfig(name, workers=workers, timeout_seconds=seconds))
        )
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture(scope="module")
def runner():
    """One runner for the tests that leave its worker alive."""
    runner = ProcessRunner(
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
        ("raise", "LookupError: no such image (scripted.py, line 25)"),
        ("text", "returned str as the score of a sample, not a number"),
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
        match=r"reward scripted did not score 2 of 2 micro-batches within 1 s "
        r"\(reward.parts.scripted.timeout_seconds",
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
    with pytest.raises(RewardError, match="a worker process of reward scripted ended: SIGKILL killed it"):
        runner.collect()
    with pytest.raises(RewardError, match="a worker process of reward scripted ended: SIGKILL killed it"):
        runner.submit(batch("1 2"))


@pytest.mark.parametrize(
    ("order", "how"),
    [("die by itself", "it left by itself with exit code 0"), ("crash", "SIGSEGV killed it")],
)
def test_a_worker_that_dies_ends_the_others_too(make_runner, order, how):
    """The other worker ignores the signal by which the pool would end it, and Python would wait for it."""
    runner = make_runner(workers=2)
    runner.submit(batch(order))
    with pytest.raises(RewardError, match=f"^a worker process of reward scripted ended: {how}"):
        runner.collect()
    assert all(_exit_code(worker) is not None for worker in runner._workers)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("reward", "why"),
    [
        ("CannotBeMade", r"could not be made: RuntimeError: no weights \(scripted.py, line \d+\)$"),
        ("LeavesWhenMade", r"could not be made: SystemExit: 0 \(scripted.py, line \d+\)$"),
        ("DiesWhenMade", "ended: it left by itself with exit code 3$"),
    ],
)
def test_a_reward_that_cannot_be_made_is_an_error_that_names_it(make_runner, workers, reward, why):
    with pytest.raises(RewardError, match=f"reward scripted {why}"):
        make_runner(reward, workers).wait_until_made()


def test_a_reward_that_takes_too_long_to_be_made(make_runner):
    runner = make_runner("HangsWhenMade", seconds=1.0)
    with pytest.raises(
        RewardError, match=r"could not be made within 1 s \(reward.parts.scripted.timeout_seconds"
    ):
        runner.wait_until_made()
    assert all(_exit_code(worker) is not None for worker in runner._workers)


def test_every_worker_has_made_the_reward_before_the_first_batch(make_runner):
    runner = make_runner(workers=2)
    runner.wait_until_made()
    assert len(runner._workers) == 2 and all(worker.is_alive() for worker in runner._workers)
    runner.submit(batch("1 2"))
    assert runner.collect().values == [1, 2]
