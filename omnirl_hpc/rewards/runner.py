"""What runs a reward: micro-batches go in while samples are generated, scores come out when all are made."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.errors import RewardError
from omnirl_hpc.rewards.call import Outcome
from omnirl_hpc.rewards.reward import RewardBatch


@dataclass(frozen=True)
class Scores:
    """The scores of all samples submitted since the last collect, in that order."""

    values: list[float]  # NaN where scoring failed
    seconds: float  # spent scoring, summed over workers
    errors: list[str]  # one sentence for each failed call
    components: dict[str, list[float]] = field(default_factory=dict)  # name -> as `values`


class RewardRunner(Protocol):
    """One reward, wherever it runs. However its code ends (an exception, exit(), a hang), it is a failed call
    or a RewardError, and never the end of the rank.
    """

    def wait_until_made(self) -> None:
        """Return when the reward is made in every worker. Raises RewardError where it cannot be made."""

    def submit(self, batch: RewardBatch) -> None:
        """Take a micro-batch; returns at once. Raises RewardError when a worker is gone."""

    def collect(self) -> Scores:
        """The scores of everything submitted. Raises RewardError at the deadline, or for a worker that is
        gone.
        """

    def close(self) -> None:
        """End the workers, whatever they are doing."""


class WorkerRunner(ABC):
    """Workers beside the rank, each of which makes the reward; subclasses say what they are."""

    def __init__(self, name: str, settings: RewardPartConfig) -> None:
        """`name` is for messages. Workers find the class that `settings` names and make one of it each."""
        self._name, self._settings = name, settings
        self._components: Sequence[str] = find_class("reward", settings.name).components
        self._submitted: list[tuple[int, Future[Outcome]]] = []
        self._made: list[Future[str | None]] = []  # of each worker: why it has no reward, or None

    @abstractmethod
    def _start(self, batch: RewardBatch) -> Future[Outcome]:
        """Give a micro-batch to a worker."""

    @abstractmethod
    def close(self) -> None: ...

    def _result(self, future: Future) -> Any:
        """Of a future that is done."""
        return future.result(timeout=0)

    def wait_until_made(self) -> None:
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
        self._submitted.append((len(batch.prompts), self._start(batch)))

    def collect(self) -> Scores:
        futures = [future for _, future in self._submitted]
        deadline = self._settings.timeout_seconds * len(futures)
        _, late = wait(futures, timeout=deadline)
        if late:
            self.close()
            raise RewardError(
                f"reward {self._name} did not score {len(late)} of {len(futures)} micro-batches within "
                f"{deadline:.0f} s (reward.parts.{self._name}.timeout_seconds for each)"
            )
        outcomes = [(count, self._result(future)) for count, future in self._submitted]
        self._submitted.clear()
        return join(outcomes, self._components)


def join(outcomes: Iterable[tuple[int, Outcome]], components: Sequence[str]) -> Scores:
    """The outcomes of calls, given with their numbers of samples, as one. What is not finite is NaN."""
    values: list[float] = []
    joined: dict[str, list[float]] = {name: [] for name in components}
    errors, seconds = [], 0.0
    for count, outcome in outcomes:
        seconds += outcome.seconds
        if outcome.error is not None:
            errors.append(outcome.error)
        values += _finite(outcome.scores, count)
        for name in components:
            joined[name] += _finite(outcome.components.get(name, ()), count)
    return Scores(values, seconds, errors, joined)


def _finite(scores: Sequence[float], count: int) -> list[float]:
    """`count` of them; all NaN where a failed call gave none."""
    return [score if math.isfinite(score) else math.nan for score in scores or [math.nan] * count]
