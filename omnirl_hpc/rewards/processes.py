"""Scores micro-batches in worker processes while the next ones are generated: for rewards that compute."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from typing import Any

from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.errors import RewardError
from omnirl_hpc.rewards.call import Outcome, call_reward, make_reward
from omnirl_hpc.rewards.reward import Reward, RewardBatch
from omnirl_hpc.rewards.runner import WorkerRunner

# Ctrl-C and Slurm's signals reach every process of a job; what they mean is the rank's decision.
RANKS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
EXIT_SECONDS = 10.0  # a crash may write a core file before it is one


class ProcessRunner(WorkerRunner):
    """See RewardRunner. A pool of spawned processes, which are started at once; a crash ends only them.

    Spawned and never forked: a fork after CUDA or MPI has started is undefined behaviour.
    """

    def __init__(self, name: str, settings: RewardPartConfig) -> None:
        super().__init__(name, settings)
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(
            settings.workers,
            context,
            initializer=_make_reward,
            initargs=(settings, context.Barrier(settings.workers)),
        )
        self._end: str | None = None  # how the first worker that died has ended
        # Processes inherit what is blocked: before `_make_reward`, a signal would end them. Starting the
        # resource tracker unblocks signals, so it comes before the workers.
        with _signals_blocked():
            multiprocessing.resource_tracker.ensure_running()
        with _signals_blocked():
            self._made = [self._pool.submit(_how_it_was_made) for _ in range(settings.workers)]
        self._workers = list(self._pool._processes.values())  # kill_workers() comes with Python 3.14

    def _start(self, batch: RewardBatch) -> Future[Outcome]:
        try:
            return self._pool.submit(_score, batch)
        except BrokenProcessPool:
            raise self._worker_ended() from None

    def close(self) -> None:
        """End the workers, whatever they are doing: Python waits at its exit for one that hangs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def _result(self, future: Future) -> Any:
        try:
            return super()._result(future)
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
_reward: Reward | None
_why_not: str | None  # the reward was not made
_all_workers: Barrier


def _make_reward(settings: RewardPartConfig, all_workers: Barrier) -> None:
    """Never raises: what went wrong is told by `_how_it_was_made`, and the pool would hide it."""
    global _reward, _why_not, _all_workers
    for number in RANKS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _all_workers = all_workers
    _reward, _why_not = make_reward(settings)


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


def _score(batch: RewardBatch) -> Outcome:
    assert _reward is not None  # wait_until_made
    return call_reward(_reward, batch)
