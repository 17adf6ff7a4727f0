"""LoRA from the actor to the engine, with proof that it arrived.

The proof is a receipt made from what the engine reads back out of the places it computes with: the same modules as the
actor trains, and the same checksum, both in the engine's dtype. Anything else stops the run.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from omnirl_hpc.errors import SyncError
from omnirl_hpc.hashing import state_checksum
from omnirl_hpc.models.lora import lora_modules
from omnirl_hpc.rollout.engine import LoraReceipt, RolloutEngine


class LoraSource(Protocol):
    def lora_state(self) -> dict[str, Tensor]:
        """Full tensors under PEFT's names; a collective operation."""


def collect_lora(actor: LoraSource, dtype: torch.dtype) -> dict[str, Tensor]:
    """A copy of the actor's adapter in the engine's dtype. Every rank takes part: shards become full tensors on every rank.

    A copy, since on one rank a full tensor is the shard itself, which leaves the device before it is delivered.
    """
    return {name: tensor.to(dtype, copy=True) for name, tensor in actor.lora_state().items()}


def deliver_lora(engine: RolloutEngine, state: dict[str, Tensor], version: int) -> LoraReceipt:
    """Give the engine the adapter `state` as `version` and return its receipt.

    Raises SyncError naming the modules that differ, or the two checksums.
    """
    receipt = engine.load_lora(state, version)
    trained = lora_modules(state)
    if receipt.modules != trained:
        raise SyncError(
            f"LoRA version {version}: the actor trains {len(trained)} modules, the engine has bound {len(receipt.modules)}; "
            f"only in the actor: {_some(trained - receipt.modules)}; only in the engine: {_some(receipt.modules - trained)}"
        )
    sent = state_checksum(state)
    if receipt.checksum != sent or receipt.version != version:
        raise SyncError(
            f"LoRA version {version}: the actor sent {sent}, the engine computes with {receipt.checksum} (version {receipt.version})"
        )
    return receipt


def _some(names: set[str] | frozenset[str]) -> str:
    shown = ", ".join(sorted(names)[:3]) or "none"
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
