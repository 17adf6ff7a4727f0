"""What an algorithm trains on: units, which are single samples or pairs of them, and are never cut apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from omnirl_hpc.sampling.samples import Batched, Condition, SampleIdentity, Samples
from omnirl_hpc.sampling.streams import Streams


@dataclass
class Pairs(Batched):
    """B pairs of samples of the same prompt, of which one is preferred."""

    identity: list[SampleIdentity]  # of the pair
    group: Tensor  # [B] int64, its place in the step
    conditions: list[Condition]  # of the prompt, at the padded width of their step
    chosen: Streams  # [B, …] fp32, clean latents
    rejected: Streams  # [B, …] fp32

    def __len__(self) -> int:
        return len(self.identity)


@dataclass
class Batch(Batched):
    """U units of one rank, with what each is worth."""

    units: Samples | Pairs
    advantages: Tensor  # [U] fp32; 1 where a unit is a preference
    weights: (
        Tensor  # [U] fp32, of a unit in the loss; 0: it does not count; an update's sum to 1 over all ranks
    )

    def __len__(self) -> int:
        return len(self.units)

    def updates(self, count: int, micro_batch_size: int) -> list[Update]:
        """Consecutive parts of equal size, one for each optimizer update."""
        size = -(-len(self) // count)
        return [Update(self[start : start + size], micro_batch_size) for start in range(0, len(self), size)]


@dataclass(frozen=True)
class Update:
    """The units of one optimizer update; iterating over it gives its micro-batches, as views."""

    batch: Batch
    micro_batch_size: int

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.batch), self.micro_batch_size):
            yield self.batch[start : start + self.micro_batch_size]
