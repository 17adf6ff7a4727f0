"""Metrics gathered over the micro-batches of a step and over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Accumulator:
    """Sums, weighted means, maxima and plain values by name. Everything but plain values is reduced over
    ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._values: dict[str, float] = {}

    def add_sum(self, name: str, value: Tensor | float) -> None:
        self._sums[name] = self._sums.get(name, self._zero()) + value

    def add_mean(self, name: str, values: Tensor, weights: Tensor) -> None:
        """values, weights: [B]. A sample of weight 0 does not count."""
        counted = weights > 0
        self.add_sum(name, (values * weights)[counted].sum().double())
        self._weights[name] = self._weights.get(name, self._zero()) + weights.sum().double()

    def add_max(self, name: str, value: Tensor | float) -> None:
        value = torch.as_tensor(value, dtype=torch.float64, device=self._device)
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def set(self, name: str, value: float) -> None:
        """A value that is already the same on every rank; the last one set counts."""
        self._values[name] = value

    def __contains__(self, maximum: str) -> bool:
        return maximum in self._maxima

    def largest(self, name: str) -> float:
        """A maximum over all ranks, before `reduce`. Collective."""
        value = self._maxima[name].clone()
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    def reduce(self) -> dict[str, float]:
        """The metrics of all ranks. Collective: every rank has added the same names in the same order."""
        result = dict(self._values)
        if self._sums:
            summed = torch.stack([*self._sums.values(), *self._weights.values()])
            dist.all_reduce(summed)
            sums = dict(zip(self._sums, summed.tolist()))
            weights = dict(zip(self._weights, summed[len(self._sums) :].tolist()))
            result |= {
                name: total / weights[name] if weights.get(name) else total for name, total in sums.items()
            }
        if self._maxima:
            largest = torch.stack(list(self._maxima.values()))
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            result |= dict(zip(self._maxima, largest.tolist()))
        return result

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._device)
