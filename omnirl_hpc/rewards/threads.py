"""Scores micro-batches in threads of the rank: for rewards that wait, such as for the answer of a server."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import SimpleQueue

from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.rewards.call import Outcome, call_reward, make_reward
from omnirl_hpc.rewards.reward import RewardBatch
from omnirl_hpc.rewards.runner import WorkerRunner


class ThreadRunner(WorkerRunner):
    """See RewardRunner. What is computed in a thread holds up generation, which needs Python's lock as well.

    A thread that hangs cannot be ended. It is a daemon, which those of the standard library's executor are
    not, so that Python does not wait for it at its exit.
    """

    def __init__(self, name: str, settings: RewardPartConfig) -> None:
        super().__init__(name, settings)
        self._jobs: SimpleQueue[tuple[Future[Outcome], RewardBatch] | None] = SimpleQueue()
        self._made = [Future() for _ in range(settings.workers)]
        for made in self._made:
            threading.Thread(target=self._work, args=(made,), name=f"reward {name}", daemon=True).start()

    def close(self) -> None:
        for _ in self._made:
            self._jobs.put(None)

    def _start(self, batch: RewardBatch) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        self._jobs.put((future, batch))
        return future

    def _work(self, made: Future[str | None]) -> None:
        """In each thread: make the reward, then score until there is nothing more to come."""
        reward, why_not = make_reward(self._settings)
        made.set_result(why_not)
        while reward is not None and (job := self._jobs.get()) is not None:
            future, batch = job
            future.set_result(call_reward(reward, batch))
