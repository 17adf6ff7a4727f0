"""Scores micro-batches in worker processes while the next ones are generated."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from typing import Any

from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.errors import RewardError
from omnirl_hpc.rewards.call import call_reward, describe_failure
from omnirl_hpc.rewards.reward import Reward, RewardBatch

# Ctrl-C and Slurm's signals reach every process of a job; what they mean is the rank's decision.
RANKS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
EXIT_SECONDS = 10.0  # a crash may write a core file before it is one


@dataclass(frozen=True)
class Scores:
    """The scores of all samples submitted since the last collect, in that order."""

    values: list[float]  # NaN where scoring failed
    seconds: float  # spent scoring, summed over workers
    errors: list[str]  # one sentence for each failed call


class RewardRunner:
    """One reward in a pool of spawned processes, which are started at once and make the reward there.

    Spawned and never forked: a fork after CUDA or MPI has started is undefined behaviour. However the code of
    a reward ends (an exception, exit(), a crash, a hang), it is a failed call or a RewardError, and never the
    end of the rank.
    """

    def __init__(self, name: str, settings: RewardPartConfig) -> None:
        """`name` is for messages. Workers find the class that `settings` names and make one of it each."""
        self._name, self._settings = name, settings
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(
            settings.workers,
            context,
            initializer=_make_reward,
            initargs=(settings, context.Barrier(settings.workers)),
        )
        self._submitted: list[tuple[int, Future]] = []
        self._end: str | None = None  # how the first worker that died has ended
        # Processes inherit what is blocked: before `_make_reward`, a signal would end them. Starting the
        # resource tracker unblocks signals, so it comes before the workers.
        with _signals_blocked():
            multiprocessing.resource_tracker.ensure_running()
        with _signals_blocked():
            self._made = [self._pool.submit(_how_it_was_made) for _ in range(settings.workers)]
        self._workers = list(self._pool._processes.values())  # kill_workers() comes with Python 3.14

    def wait_until_made(self) -> None:
        """Return when the reward is made in every worker. Raises RewardError where it cannot be made."""
        seconds = self._settings.timeout_seconds
        _, late = wait(self._made, timeout=seconds)
        if late:
            self.close()
            raise RewardError(
                f"reward {self._name} could not be made within {seconds:g} s "
                f"(reward.parts.{self._name}.timeout_seconds)"
            )
        for error in map(self._result, self._made):
            if error is not None:
                self.close()
                raise RewardError(f"reward {self._name} could not be made: {error}")

    def submit(self, batch: RewardBatch) -> None:
        """Start scoring; returns at once. Raises RewardError when a worker process is gone."""
        try:
            future = self._pool.submit(_score, batch)
        except BrokenProcessPool:
            raise self._worker_ended() from None
        self._submitted.append((len(batch.prompts), future))

    def collect(self) -> Scores:
        """Wait for everything submitted. Raises RewardError at the deadline, or for a worker that is gone."""
        futures = [future for _, future in self._submitted]
        deadline = self._settings.timeout_seconds * len(futures)
        _, late = wait(futures, timeout=deadline)
        if late:
            self.close()
            raise RewardError(
                f"reward {self._name} did not score {len(late)} of {len(futures)} micro-batches within "
                f"{deadline:.0f} s (reward.parts.{self._name}.timeout_seconds for each)"
            )
        values, errors, seconds = [], [], 0.0
        for count, future in self._submitted:
            scores, error, spent = self._result(future)
            seconds += spent
            if error is not None:
                errors.append(error)
                scores = [math.nan] * count
            values += [score if math.isfinite(score) else math.nan for score in scores]
        self._submitted.clear()
        return Scores(values, seconds, errors)

    def close(self) -> None:
        """End the workers, whatever they are doing: Python waits at its exit for one that hangs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def _result(self, future: Future) -> Any:
        try:
            return future.result(timeout=0)
        except BrokenProcessPool:
            raise self._worker_ended() from None

    def _worker_ended(self) -> RewardError:
        if self._end is None:
            gone = multiprocessing.connection.wait([worker.sentinel for worker in self._workers], timeout=0)
            codes = [_exit_code(worker) for worker in self._workers if worker.sentinel in gone]
            self._end = f": {_describe_exit(codes[0])}" if codes and codes[0] is not None else ""
            self.close()  # the others ignore the signal by which the pool would end them
        return RewardError(f"a worker process of reward {self._name} ended{self._end}")


def _exit_code(worker: BaseProcess) -> int | None:
    """Of a worker that is gone or going: its pipes close first, and the pool may be reading the code, too."""
    end = time.monotonic() + EXIT_SECONDS
    while worker.exitcode is None and time.monotonic() < end:
        time.sleep(0.01)
    return worker.exitcode


def _describe_exit(code: int) -> str:
    """How a process ended, from multiprocessing's exit code."""
    if code >= 0:
        return f"it left by itself with exit code {code}"
    name = signal.Signals(-code).name
    return f"{name} killed it" + (", as a node without memory does" if name == "SIGKILL" else "")


@contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, RANKS_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In a worker process
_reward: Reward
_why_not: str | None  # the reward was not made
_all_workers: Barrier


def _make_reward(settings: RewardPartConfig, all_workers: Barrier) -> None:
    """Never raises: what went wrong is told by `_how_it_was_made`, and the pool would hide it."""
    global _reward, _why_not, _all_workers
    for number in RANKS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _why_not, _all_workers = None, all_workers
    try:
        _reward = find_class("reward", settings.name)(settings)
    except BaseException as failure:  # a user's code: it may call exit(), too
        _why_not = describe_failure(failure)


def _how_it_was_made() -> str | None:
    """Why this worker has no reward, or None. Waits for the other workers, so that each is asked once."""
    _all_workers.wait()
    return _why_not


def _end_with_parent() -> None:
    """A rank that is killed with -9 cannot end its workers."""
    rank = multiprocessing.parent_process()
    assert rank is not None  # this process is a worker
    multiprocessing.connection.wait([rank.sentinel])
    os._exit(1)


def _score(batch: RewardBatch) -> tuple[list[float], str | None, float]:
    """Scores, or what went wrong, and the seconds that it took."""
    started = time.perf_counter()
    scores, error = call_reward(_reward, batch)
    return scores, error, time.perf_counter() - started
