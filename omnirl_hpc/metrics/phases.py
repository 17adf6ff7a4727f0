"""How long each phase of a step takes, and which phase a rank is in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Every step reports all of these, also where a phase did not take place.
TIMED_PHASES = (
    "encode",
    "rollout",
    "decode",
    "reward_exposed",
    "swap",
    "old_log_prob",
    "actor",
    "sync",
    "evaluation",
    "checkpoint",
    "other",
)


class PhaseTimer:
    """Seconds by phase since the last `take`. `current` names the phase a failure happened in.

    Phases nest, and a phase's time is its own: what an inner phase takes is not counted in the outer one, so
    that the phases of a step add up to the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._mark = time.perf_counter()
        self.current = "start-up"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer = self.current
        self._enter(name)
        yield  # on failure `current` keeps the name, so that the error can say where it happened
        self._enter(outer)

    def take(self) -> dict[str, float]:
        """`time/<phase>` in seconds, and start again."""
        self._enter(self.current)
        taken = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken

    def _enter(self, name: str) -> None:
        """Book the time since the last change to the current phase and go on in `name`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self._seconds[self.current] = self._seconds.get(self.current, 0.0) + now - self._mark
        self._mark, self.current = now, name


class StepClock:
    """Puts what a step took into its metrics."""

    def __init__(self, timer: PhaseTimer, samples_per_step: int) -> None:
        self._timer, self._samples = timer, samples_per_step

    def book(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of a step with the seconds since the last call added to what it took so far, by phase.

        A checkpoint is written after this, and counts in the next step.
        """
        taken = self._timer.take()
        names = [f"time/{phase}" for phase in TIMED_PHASES]
        times = {name: metrics.get(name, 0.0) + taken.get(name, 0.0) for name in names}
        seconds = sum(times.values())
        return metrics | times | {"time/step": seconds, "images_per_second": self._samples / seconds}
