"""The protocol of an actor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from omnirl_hpc.algorithms.algorithm import TrainingPoint
from omnirl_hpc.policies import CURRENT, Blend
from omnirl_hpc.sampling.streams import Streams


class Actor(Protocol):
    """Evaluates the policy with gradients and updates it. Every method is collective over the actor mesh."""

    policies: tuple[str, ...]  # those whose weights it holds; the reference is what is left without them
    adapter_config: dict[str, Any] | None  # PEFT's settings of the adapter; None where weights are trained

    @property
    def updates(self) -> int:
        """Optimizer steps so far."""

    @property
    def transformer(self) -> nn.Module:
        """The network that is trained, or the first of several, to be looked at."""

    def velocity(self, point: TrainingPoint, policy: str) -> Streams:
        """The guided velocity of each stream, shaped as its latents, that a policy, or the reference,
        predicts. Where several networks take turns, a point belongs to one of them, on all ranks the same: it
        raises MismatchError on every rank where its timesteps do not.
        """

    def apply_gradients(self) -> tuple[float, float]:
        """Clip, take an optimizer step, clear the gradients. Returns (gradient norm before clipping, learning
        rate).
        """

    def blend(self, blend: Blend) -> None:
        """Move a stored policy towards another one, or copy it."""

    def weights(
        self, policy: str = CURRENT, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """What a policy is made of, one full tensor at a time, in the same order on every rank: an adapter
        under PEFT's names, or all weights under diffusers'. In the dtype it is kept in (fp32, but for an
        adapter with actor.lora.dtype), or in `dtype`. A tensor may be the actor's own memory: copy what is
        to stay. Raises ValueError for a policy that the actor does not hold.
        """

    def load(self, policy: str, state: Mapping[str, Tensor]) -> None:
        """The inverse of `weights`. Raises CheckpointError where names or shapes do not fit."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients so far of what is trained, one full tensor at a time."""

    def full_optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """The optimizer's state by name, one full tensor at a time."""

    def sharded_state(self) -> dict[str, Tensor]:
        """The actor's own sharded tensors by name: the optimizer's, and every policy's weights where these
        are trained. Writing into them changes the actor.
        """

    def scheduler_state(self) -> dict[str, Any]:
        """The learning rate schedule, as JSON."""

    def load_scheduler_state(self, state: dict[str, Any]) -> None:
        """The inverse of `scheduler_state`."""

    def keep(self) -> None:
        """Remember what is trained, optimizer and schedule in host memory, between two steps;
        asleep or not.
        """

    def rollback(self) -> None:
        """Undo everything since `keep`. Raises RuntimeError where a `sleep` after an update has
        overwritten what was kept.
        """

    def sleep(self) -> None:
        """Free the device: parameters and optimizer state go to pinned host memory. No use until `wake`."""

    def wake(self) -> None:
        """Bring them back, bit for bit."""
