"""The protocol of an actor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from omnirl_hpc.algorithms.algorithm import TrainingPoint
from omnirl_hpc.sampling.streams import Streams


class Actor(Protocol):
    """Evaluates the policy with gradients and updates it. Every method is collective over the actor mesh."""

    lora_targets: tuple[str, ...]  # empty where all weights are trained

    def velocity(self, point: TrainingPoint, adapter: str) -> Streams:
        """The guided velocity of each stream, shaped as its latents, under an adapter set of the algorithm."""

    def apply_gradients(self) -> tuple[float, float]:
        """Clip, take an optimizer step, clear the gradients. Returns (gradient norm before clipping, learning
        rate).
        """

    def trained(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """What is trained, one full tensor at a time, in the same order on every rank: the adapter under
        PEFT's names, or all weights under diffusers'. In fp32, or in `dtype`. A tensor may be the actor's own
        memory: copy what is to stay.
        """

    def lora_state(self) -> dict[str, Tensor]:
        """The trained adapter as full tensors under PEFT's names, on every rank."""

    def load_lora_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `lora_state`. Raises CheckpointError where names or shapes do not fit."""

    def ema_state(self) -> dict[str, Tensor] | None:
        """The running mean of the trained adapter, named as by `lora_state`; None where none is kept."""

    def load_ema_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `ema_state`."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients so far of what is trained, one full tensor at a time."""

    def full_optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """The optimizer's state by name, one full tensor at a time."""

    def sharded_state(self) -> dict[str, Tensor]:
        """The actor's own sharded tensors by name: the optimizer's, and the weights where all are trained.
        Writing into them changes the actor.
        """

    def scheduler_state(self) -> dict[str, Any]:
        """The learning rate schedule, as JSON."""

    def load_scheduler_state(self, state: dict[str, Any]) -> None:
        """The inverse of `scheduler_state`."""

    def keep(self) -> None:
        """Remember what is trained, optimizer and schedule in host memory, between two steps; offloaded or
        not.
        """

    def rollback(self) -> None:
        """Undo everything since `keep`. Raises RuntimeError where an `offload` after an update has
        overwritten what was kept.
        """

    def offload(self) -> None:
        """Free the device: parameters and optimizer state go to pinned host memory. No use until `onload`."""

    def onload(self) -> None:
        """Bring them back, bit for bit."""
