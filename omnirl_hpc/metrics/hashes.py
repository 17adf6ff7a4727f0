"""`hashes.jsonl`: content hashes of what each phase of a step produced, the evidence for `omnirl-hpc
compare`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from omnirl_hpc.algorithms.units import Pairs
from omnirl_hpc.hashing import stream_checksum, tensor_checksum
from omnirl_hpc.run_directory import RunDirectory
from omnirl_hpc.sampling.samples import Condition, Samples

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

    def rollout(self, step: int, batch: Samples, rewards: Tensor, advantages: Tensor) -> None:
        """What the engine made of the step, and what it was worth."""
        if not self._enabled:
            return
        identity, made = batch.group * 2**20 + batch.sample, batch.trajectory
        parts: dict[str, Sequence[Iterable[Tensor]]] = {
            "noise": [batch.noise_hash],
            "embeddings": _floating(batch.conditions),
            "latents": _by_name(batch.clean if made is None else made.latents),
            "log_probs": [] if made is None else [made.log_probs],
            "images": [] if batch.media is None else [_images(batch.media.frames)],
            "audio": [] if batch.media is None or batch.media.audio is None else [batch.media.audio],
        }
        for name, tensors in parts.items():
            self._write_samples(step, "rollout", name, tensors, identity)
        self._write(step, "reward", "rewards", tensor_checksum(rewards))
        self._write(step, "reward", "advantages", tensor_checksum(advantages))

    def pairs(self, step: int, pairs: Pairs) -> None:
        """What a table gave a step."""
        if not self._enabled:
            return
        parts: dict[str, Sequence[Iterable[Tensor]]] = {
            "embeddings": _floating(pairs.conditions),
            "chosen": _by_name(pairs.chosen),
            "rejected": _by_name(pairs.rejected),
        }
        for name, tensors in parts.items():
            self._write_samples(step, "pairs", name, tensors, pairs.group)

    def gradients(self, step: int, update: int, gradients: TensorsOf) -> None:
        """Full gradients of one optimizer update, before clipping."""
        if self._enabled:
            self._write(step, f"update_{update}", "gradients", stream_checksum(gradients()))

    def actor(self, step: int, trained: TensorsOf, optimizer: TensorsOf) -> None:
        """Adapter (or all weights) and optimizer at the end of the step, as full tensors."""
        if self._enabled:
            self._write(step, "end", "weights", stream_checksum(trained()))
            self._write(step, "end", "optimizer", stream_checksum(optimizer()))

    def _write_samples(
        self, step: int, phase: str, name: str, tensors: Sequence[Iterable[Tensor]], identity: Tensor
    ) -> None:
        """Several tensors of the same samples under one name; nothing where there are none."""
        if tensors:
            hashes = [_samples_hash(tensor, identity) for tensor in tensors]
            total = sum((2 * place + 1) * value for place, value in enumerate(hashes))
            self._write(step, phase, name, total % 2**64)

    def _write(self, step: int, phase: str, name: str, value: int | str) -> None:
        if self._rank == 0:
            text = value if isinstance(value, str) else f"{value:016x}"
            with self._run.writing(self._run.hashes), self._run.hashes.open("a") as file:
                file.write(json.dumps({"step": step, "phase": phase, "tensor": name, "hash": text}) + "\n")


def _by_name(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [tensors[name] for name in sorted(tensors)]


def _floating(conditions: Sequence[Condition]) -> list[list[Tensor]]:
    """The embeddings among the tensors of conditions, one list of B rows for each."""
    names = sorted(name for name, tensor in conditions[0].items() if tensor.is_floating_point())
    return [[condition[name] for condition in conditions] for name in names]


def _images(frames: Tensor) -> Tensor:
    """[B, F, 3, H, W] frames, [B, 3, H, W] where there is one."""
    return frames.squeeze(1)


def _samples_hash(rows: Iterable[Tensor], identity: Tensor) -> int:
    """B rows, identity [B] int64; the sum over the samples of all ranks."""
    total = sum(tensor_checksum(row) * (2 * key + 1) for row, key in zip(rows, identity.tolist())) % 2**64
    signed = torch.tensor(total - 2**64 if total >= 2**63 else total, device=identity.device)
    dist.all_reduce(signed)
    return int(signed) % 2**64
