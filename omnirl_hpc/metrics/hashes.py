"""`hashes.jsonl`: content hashes of what each phase of a step produced, the evidence for `omnirl-hpc
compare`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from omnirl_hpc.hashing import stream_checksum, tensor_checksum
from omnirl_hpc.run_directory import RunDirectory
from omnirl_hpc.sampling.trajectories import Trajectories

TensorsOf = Callable[
    [], Iterable[tuple[str, Tensor]]
]  # called only where hashes are wanted: it gathers full tensors


class StepHashes:
    """One line for each tensor of each phase of each step; nothing at all unless enabled. All methods are
    collective.

    A hash of samples is a sum over samples, each weighted by its identity, so that it does not depend on
    which rank made which sample. A hash of parameters is that of the full tensors.
    """

    def __init__(self, run: RunDirectory, rank: int, enabled: bool) -> None:
        self._run = run
        self._rank = rank
        self._enabled = enabled

    def rollout(self, step: int, batch: Trajectories, rewards: Tensor, advantages: Tensor) -> None:
        """What the engine made of the step, and what it was worth."""
        if not self._enabled:
            return
        identity = batch.group * 2**20 + batch.sample
        parts = {
            "noise": batch.noise_hash,
            "embeddings": batch.text.embeds,
            "latents": batch.latents,
            "log_probs": batch.log_probs,
            "images": batch.images,
        }
        for name, tensor in parts.items():
            self._write(step, "rollout", name, _samples_hash(tensor, identity))
        self._write(step, "reward", "rewards", tensor_checksum(rewards))
        self._write(step, "reward", "advantages", tensor_checksum(advantages))

    def gradients(self, step: int, update: int, gradients: TensorsOf) -> None:
        """Full gradients of one optimizer update, before clipping."""
        if self._enabled:
            self._write(step, f"update_{update}", "gradients", stream_checksum(gradients()))

    def actor(self, step: int, trained: TensorsOf, optimizer: TensorsOf) -> None:
        """Adapter (or all weights) and optimizer at the end of the step, as full tensors."""
        if self._enabled:
            self._write(step, "end", "weights", stream_checksum(trained()))
            self._write(step, "end", "optimizer", stream_checksum(optimizer()))

    def _write(self, step: int, phase: str, name: str, value: int | str) -> None:
        if self._rank == 0:
            text = value if isinstance(value, str) else f"{value:016x}"
            with self._run.writing(self._run.hashes), self._run.hashes.open("a") as file:
                file.write(json.dumps({"step": step, "phase": phase, "tensor": name, "hash": text}) + "\n")


def _samples_hash(tensor: Tensor, identity: Tensor) -> int:
    """tensor [B, …], identity [B] int64; the sum over the samples of all ranks."""
    total = sum(tensor_checksum(row) * (2 * key + 1) for row, key in zip(tensor, identity.tolist())) % 2**64
    signed = torch.tensor(total - 2**64 if total >= 2**63 else total, device=tensor.device)
    dist.all_reduce(signed)
    return int(signed) % 2**64
