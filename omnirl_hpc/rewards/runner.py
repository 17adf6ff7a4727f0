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
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.errors import RewardError
from omnirl_hpc.rewards.reward import Reward, RewardBatch

# Ctrl-C and Slurm's signals reach every process of a job; what they mean is the rank's decision.
RANKS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Scores:
    """The scores of all samples submitted since the last collect, in that order."""

    values: list[float]  # NaN where scoring failed
    seconds: float  # spent scoring, summed over workers
    errors: list[str]  # one sentence for each failed call


class RewardRunner:
    """One reward in a pool of spawned processes.

    Spawned and never forked: a fork after CUDA or MPI has started is undefined behaviour.
    """

    def __init__(self, name: str, settings: RewardPartConfig) -> None:
        """`name` is for messages. Workers find the class that `settings` names and make one of it each."""
        self._name, self._settings = name, settings
        self._pool = ProcessPoolExecutor(
            settings.workers,
            multiprocessing.get_context("spawn"),
            initializer=_make_reward,
            initargs=(settings,),
        )
        self._submitted: list[tuple[int, Future]] = []

    def submit(self, batch: RewardBatch) -> None:
        """Start scoring; returns at once. Raises RewardError when a worker process is gone."""
        try:
            # Processes are started here, and inherit what is blocked: before `_make_reward`, a signal would
            # end them.
            with _signals_blocked():
                # starting it unblocks signals, so before the workers
                multiprocessing.resource_tracker.ensure_running()
            with _signals_blocked():
                future = self._pool.submit(_score, batch)
        except BrokenProcessPool as error:
            raise self._worker_ended(error) from None
        self._submitted.append((len(batch.prompts), future))

    def collect(self) -> Scores:
        """Wait for everything submitted. Raises RewardError at the deadline or when a worker process is
        gone.
        """
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
            if error is None and len(scores) != count:
                error = f"returned {len(scores)} scores for {count} samples"
            if error is not None:
                errors.append(error)
                scores = [math.nan] * count
            values += [score if math.isfinite(score) else math.nan for score in scores]
        self._submitted.clear()
        return Scores(values, seconds, errors)

    def close(self) -> None:
        """End the workers, whatever they are doing: Python waits at its exit for one that hangs."""
        workers = list(
            (self._pool._processes or {}).values()
        )  # the public kill_workers() comes with Python 3.14
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()

    def _result(self, future: Future) -> tuple[list[float], str | None, float]:
        try:
            return future.result(timeout=0)
        except BrokenProcessPool as error:
            raise self._worker_ended(error) from None

    def _worker_ended(self, error: BrokenProcessPool) -> RewardError:
        return RewardError(f"a worker process of reward {self._name} ended: {error}")


@contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, RANKS_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_reward: Reward  # in a worker process


def _make_reward(settings: RewardPartConfig) -> None:
    global _reward
    for number in RANKS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _reward = find_class("reward", settings.name)(settings)


def _end_with_parent() -> None:
    """A rank that is killed with -9 cannot end its workers."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _score(batch: RewardBatch) -> tuple[list[float], str | None, float]:
    """Scores, or what went wrong. A reward is a user's code and may raise anything: it comes back as a failed
    call.
    """
    started = time.perf_counter()
    try:
        scores, error = [float(score) for score in _reward.score(batch)], None
    except Exception as failure:  # counted, masked out and reported by the trainer; never a score of 0
        scores, error = [], f"{type(failure).__name__}: {failure}{_place(failure)}"
    return scores, error, time.perf_counter() - started


def _place(failure: Exception) -> str:
    """The last line of the reward's own file that was running: the traceback stays in the worker."""
    below = [frame for frame in traceback.extract_tb(failure.__traceback__) if frame.filename != __file__]
    own = [frame for frame in below if frame.filename == below[0].filename]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
