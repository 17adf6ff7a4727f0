"""What is trained, from the actor to the engine, with proof that it arrived: an adapter at once, all weights
one at a time.

The proof is made from what the engine reads back out of the places it computes with: the same modules (or
weights) as the actor trains, and the same checksum, both in the engine's dtype. Anything else stops the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import AbstractSet, Protocol

import torch
from torch import Tensor

from omnirl_hpc.errors import SyncError
from omnirl_hpc.hashing import combined_checksum, state_checksum, tensor_checksum
from omnirl_hpc.models.lora import lora_modules
from omnirl_hpc.rollout.engine import Receipt, RolloutEngine


class LoraSource(Protocol):
    def lora_state(self) -> dict[str, Tensor]:
        """Full tensors under PEFT's names; a collective operation."""


class WeightSource(Protocol):
    def trained(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under diffusers' names, one at a time; a collective operation."""


def collect_lora(actor: LoraSource, dtype: torch.dtype) -> dict[str, Tensor]:
    """A copy of the actor's adapter in the engine's dtype. Every rank takes part: shards become full tensors
    on every rank.

    A copy, since on one rank a full tensor is the shard itself, which leaves the device before it is
    delivered.
    """
    return {name: tensor.to(dtype, copy=True) for name, tensor in actor.lora_state().items()}


def deliver_lora(engine: RolloutEngine, state: dict[str, Tensor], version: int) -> Receipt:
    """Give the engine the adapter `state` as `version` and return its receipt.

    Raises SyncError naming the modules that differ, or the two checksums.
    """
    receipt = engine.load_lora(state, version)
    _require_same(lora_modules(state), receipt.bound, f"LoRA version {version}", "modules")
    sent = state_checksum(state)
    if receipt.checksum != sent or receipt.version != version:
        raise SyncError(
            f"LoRA version {version}: the actor sent {sent}, the engine computes with {receipt.checksum} (version {receipt.version})"
        )
    return receipt


def send_weights(
    actor: WeightSource, engine: RolloutEngine, dtype: torch.dtype, version: int
) -> dict[str, int]:
    """Stream all weights into the engine, which may be asleep. Returns the checksum of each as it was sent.

    No more than one full tensor exists at a time. Collective.
    """
    sent: dict[str, int] = {}

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in actor.trained(dtype):
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
            f"weights version {version}: the engine computes with other values than the actor sent, in {len(wrong)} of "
            f"{len(sent)} weights: {_some(wrong)}"
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
