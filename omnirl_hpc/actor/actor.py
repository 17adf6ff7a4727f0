"""The protocol of an actor."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from omnirl_hpc.algorithms.algorithm import TrainingPoint


class Actor(Protocol):
    """Evaluates the policy with gradients and updates it. Every method is collective over the actor mesh."""

    def velocity(self, point: TrainingPoint, adapter: str) -> Tensor:
        """[B, S, C] guided velocity under an adapter set of the algorithm."""

    def apply_gradients(self) -> tuple[float, float]:
        """Clip, take an optimizer step, clear the gradients. Returns (gradient norm before clipping, learning rate)."""

    def lora_state(self) -> dict[str, Tensor]:
        """The trained adapter as full tensors under PEFT's names, on every rank."""

    def offload(self) -> None:
        """Free the device: parameters and optimizer state go to pinned host memory. No use until `onload`."""

    def onload(self) -> None:
        """Bring them back, bit for bit."""
