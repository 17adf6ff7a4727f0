"""Requests -> micro-batches of one fixed size."""

from __future__ import annotations

from typing import Iterator, Sequence, TypeVar

Item = TypeVar("Item")


def micro_batches(items: Sequence[Item], size: int) -> Iterator[tuple[list[Item], int]]:
    """Consecutive batches of exactly `size` items, each with the number of real ones.

    The last batch is padded with its own last item. Every kernel then sees one shape, so that a sample's value does not depend
    on how many others are generated with it.
    """
    for start in range(0, len(items), size):
        batch = list(items[start : start + size])
        yield batch + [batch[-1]] * (size - len(batch)), len(batch)
