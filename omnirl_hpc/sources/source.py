"""The protocol of a source."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from omnirl_hpc.algorithms.units import Batch
from omnirl_hpc.data.sampler import GroupSampler
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.sampling.schedule import Schedule


@dataclass(frozen=True)
class StepInput:
    """What a rank trains on in a step."""

    batch: Batch
    metrics: dict[str, float]  # of all ranks


class Source(Protocol):
    """Gives a step its units. Every method but `state_dict` is collective."""

    schedules: dict[str, Schedule]  # of each stream, as training uses them
    samples_per_step: int  # of all ranks

    def next(self, step: int, check_stop: Callable[[], None]) -> StepInput:
        """The units of step `step`. `check_stop` is called after each micro-batch."""

    def fit(self, step: int) -> None:
        """Find out before the first step whether micro-batches fit into memory; it also warms kernels up."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold for the source to go on, as JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`. Raises ConfigError for the state of another table."""


class TableCursor:
    """Where a source stands in its table, and which table that is."""

    def __init__(self, path: str, sampler: GroupSampler) -> None:
        self._path, self._sampler, self._fingerprint = path, sampler, fingerprint(path)

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self._sampler.cursor, "prompts": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["prompts"] != self._fingerprint:
            raise ConfigError(f"data.prompts={self._path} is not the table that the run was started with")
        self._sampler.cursor = state["cursor"]


def fingerprint(path: str) -> str:
    """Tells one file from another without reading all of it: its size, its first and last MiB (where parquet
    has its footer).
    """
    size, block = Path(path).stat().st_size, 1 << 20
    with open(path, "rb") as file:
        digest = hashlib.blake2b(str(size).encode(), digest_size=16)
        digest.update(file.read(block))
        file.seek(max(0, size - block))
        digest.update(file.read(block))
    return digest.hexdigest()
