"""A policy from the actor to the engine, with proof that it arrived: an adapter at once, all weights one at a
time.

The proof is made from what the engine reads back out of the places it computes with: the same modules (or
weights) as the actor trains, and the same checksum, both in the engine's dtype. Anything else stops the run.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import torch
from torch import Tensor

from omnirl_hpc.errors import SyncError
from omnirl_hpc.hashing import combined_checksum, state_checksum, tensor_checksum
from omnirl_hpc.models.lora import lora_modules
from omnirl_hpc.policies import CURRENT
from omnirl_hpc.rollout.engine import Receipt, RolloutEngine

log = logging.getLogger(__name__)


class PolicySource(Protocol):
    """What of an actor is needed here."""

    adapter_config: dict[str, Any] | None  # None: all weights are trained

    def weights(
        self, policy: str = CURRENT, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under PEFT's or diffusers' names, one at a time; a collective operation."""


class Sync(ABC):
    """From one actor to one engine. Between `send`, with the actor on the device, and `confirm`, with the
    engine on it, the two may change places. Both are collective.
    """

    unit: str  # what is counted

    def __init__(self, actor: PolicySource, engine: RolloutEngine, dtype: torch.dtype) -> None:
        """dtype: the engine's."""
        self._actor, self._engine, self._dtype = actor, engine, dtype
        self.metrics: dict[str, float] = {}  # of the last one

    @abstractmethod
    def send(self, policy: str, version: int) -> None:
        """Take a policy from the actor."""

    def confirm(self, version: int) -> Receipt:
        """What the engine computes with. Raises SyncError where that is not what was sent."""
        receipt = self._confirm(version)
        bound = len(receipt.bound)
        log.info("version %d: %d %s bound, checksum %s", version, bound, self.unit, receipt.checksum)
        self.metrics = {"sync/bound": bound, "sync/version": receipt.version}
        return receipt

    @abstractmethod
    def _confirm(self, version: int) -> Receipt: ...


class AdapterSync(Sync):
    """The adapter waits on the device until the engine is there to take it."""

    unit = "LoRA modules"

    def send(self, policy: str, version: int) -> None:
        self._sent = collect_lora(self._actor, self._dtype, policy)

    def _confirm(self, version: int) -> Receipt:
        sent, self._sent = self._sent, {}
        return deliver_lora(self._engine, sent, version)


class WeightSync(Sync):
    """All weights go while the engine still sleeps, into its copies in host memory: the device need not hold
    both.
    """

    unit = "weights"

    def send(self, policy: str, version: int) -> None:
        self._sent = send_weights(self._actor, self._engine, self._dtype, version, policy)

    def _confirm(self, version: int) -> Receipt:
        return confirm_weights(self._engine, self._sent, version)


class NoSync:
    """Where no engine samples."""

    metrics: dict[str, float] = {}

    def send(self, policy: str, version: int) -> None: ...

    def confirm(self, version: int) -> None: ...


def make_sync(actor: PolicySource, engine: RolloutEngine, dtype: torch.dtype) -> Sync:
    return (WeightSync if actor.adapter_config is None else AdapterSync)(actor, engine, dtype)


def collect_lora(actor: PolicySource, dtype: torch.dtype, policy: str = CURRENT) -> dict[str, Tensor]:
    """A copy of a policy's adapter in the engine's dtype. Every rank takes part: shards become full tensors
    on every rank.

    A copy, since on one rank a full tensor is the shard itself, which leaves the device before it is
    delivered.
    """
    return {name: tensor.to(dtype, copy=True) for name, tensor in actor.weights(policy)}


def deliver_lora(engine: RolloutEngine, state: dict[str, Tensor], version: int) -> Receipt:
    """Give the engine the adapter `state` as `version` and return its receipt.

    Raises SyncError naming the modules that differ, or the two checksums.
    """
    receipt = engine.load_lora(state, version)
    _require_same(lora_modules(state), receipt.bound, f"LoRA version {version}", "modules")
    sent = state_checksum(state)
    if receipt.checksum != sent or receipt.version != version:
        raise SyncError(
            f"LoRA version {version}: the actor sent {sent}, the engine computes with {receipt.checksum} "
            f"(version {receipt.version})"
        )
    return receipt


def send_weights(
    actor: PolicySource, engine: RolloutEngine, dtype: torch.dtype, version: int, policy: str = CURRENT
) -> dict[str, int]:
    """Stream all weights into the engine, which may be asleep. Returns the checksum of each as it was sent.

    No more than one full tensor exists at a time. Collective.
    """
    sent: dict[str, int] = {}

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in actor.weights(policy, dtype):
            sent[name] = tensor_checksum(tensor)
            yield name, tensor

    engine.load_weights(stream(), version)
    return sent


def confirm_weights(engine: RolloutEngine, sent: dict[str, int], version: int) -> Receipt:
    """The receipt of what the engine, awake again, computes with. Collective over the replica.

    Raises SyncError naming the weights that differ from those that were sent.
    """
    held = {name: tensor_checksum(tensor) for name, tensor in engine.held_weights(list(sent))}
    _require_same(sent.keys(), held.keys(), f"weights version {version}", "weights")
    if wrong := {name for name in sent if held[name] != sent[name]}:
        raise SyncError(
            f"weights version {version}: the engine computes with other values than the actor sent, in "
            f"{len(wrong)} of {len(sent)} weights: {_some(wrong)}"
        )
    return Receipt(version, frozenset(held), combined_checksum(held))


def _require_same(trained: AbstractSet[str], bound: AbstractSet[str], what: str, parts: str) -> None:
    if bound != trained:
        raise SyncError(
            f"{what}: the actor trains {len(trained)} {parts}, the engine has bound {len(bound)}; "
            f"only in the actor: {_some(trained - bound)}; only in the engine: {_some(bound - trained)}"
        )


def _some(names: AbstractSet[str]) -> str:
    shown = ", ".join(sorted(names)[:3]) or "none"
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
