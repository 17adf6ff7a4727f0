"""What a training step learns from: samples that an engine generated or that a table holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from omnirl_hpc.sampling.streams import Streams

# What a model reads of one prompt besides latents and timestep: text embeddings, masks, condition images,
# token ids. Names and meaning are the family's; tensors have no batch dimension. The samples of a group hold
# the same object, so that a condition is in memory once for each prompt.
Condition = dict[str, Tensor]

Rows = slice | Tensor | Sequence[int]


def stack_conditions(conditions: Sequence[Condition]) -> dict[str, Tensor]:
    """Conditions of one shape -> one batch [B, …] of each of their tensors."""
    return {name: torch.stack([condition[name] for condition in conditions]) for name in conditions[0]}


@dataclass(frozen=True)
class SampleIdentity:
    """What determines every random draw that belongs to a sample, in rollout and in training."""

    seed: int  # of the run
    step: int
    prompt_id: str
    sample: int  # of the prompt

    def address(self, purpose: str, *place: int | str) -> tuple[int | str, ...]:
        """The address of a draw (see sampling.noise): `place` tells draws of one purpose from each other."""
        return (self.seed, purpose, self.step, self.prompt_id, self.sample, *place)


@dataclass
class Batched:
    """A dataclass whose fields hold B rows each: tensors [B, …], lists, dictionaries of tensors, other
    Batched, or None; a plain number holds for all rows.
    """

    def __getitem__(self, rows: Rows) -> Self:
        return type(self)(**{field.name: _take(getattr(self, field.name), rows) for field in fields(self)})

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """All rows of `parts`, in order."""
        return cls(
            **{field.name: _join([getattr(part, field.name) for part in parts]) for field in fields(cls)}
        )


def _take(value: Any, rows: Rows) -> Any:
    if isinstance(value, Tensor):
        return value[rows.to(value.device) if isinstance(rows, Tensor) else rows]
    if isinstance(value, Batched):
        return value[rows]
    if isinstance(value, dict):
        return {name: _take(tensor, rows) for name, tensor in value.items()}
    if isinstance(value, list):
        numbers = torch.arange(len(value))[rows.cpu() if isinstance(rows, Tensor) else rows]
        return [value[number] for number in numbers.tolist()]
    return value


def _join(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(values)
    if isinstance(first, Batched):
        return type(first).cat(values)
    if isinstance(first, dict):
        return {name: _join([value[name] for value in values]) for name in first}
    if isinstance(first, list):
        return [row for value in values for row in value]
    if any(value != first for value in values):
        raise ValueError(f"batches with {values} cannot be one")
    return first


@dataclass
class Media(Batched):
    """What people and rewards look at and listen to; on the host."""

    frames: Tensor  # [B, F, 3, H, W] uint8; F = 1: images
    audio: Tensor | None = None  # [B, channels, T] fp32 in [-1, 1]
    fps: float = 0.0  # frames a second; 0: images
    sample_rate: int = 0  # of the sound, in Hz
    text: list[str] | None = None  # what the model wrote

    def on_host(self) -> Media:
        """A copy: what an engine decodes may be a tensor of inference mode, or one that it uses again."""
        audio = None if self.audio is None else self.audio.to("cpu", copy=True)
        return replace(self, frames=self.frames.to("cpu", copy=True), audio=audio)


@dataclass
class Trajectory(Batched):
    """The stochastic steps of samples, W for each of them. Latents and sigmas by stream, all fp32."""

    latents: Streams  # [B, W + 1, …], at the edges of the window
    log_probs: Tensor  # [B, W], of the engine: the mean over the elements of all streams
    sigmas: Streams  # [B, W + 1], at the edges of the window
    timesteps: Streams  # [B, W], what the model is called with at each step of the window
    sigma_max: Streams  # [B], the schedule's second sigma
    expert: Tensor  # [B, W] int64, the network that made each step: 0 in families that have one


@dataclass
class Samples(Batched):
    """B samples, batch first. Conditions have the padded width of their step."""

    identity: list[SampleIdentity]
    group: Tensor  # [B] int64, the group of the step
    conditions: list[Condition]
    negative: list[Condition] | None  # None: no guidance
    clean: Streams  # [B, …] fp32, the latents at sigma = 0
    version: Tensor  # [B] int64, of the policy that made them
    noise_hash: Tensor  # [B] int64, of a sample's initial and transition noise
    media: Media | None = None  # None: nobody was to look at them
    trajectory: Trajectory | None = None  # None: only the end is known

    def __len__(self) -> int:
        return len(self.identity)

    @property
    def sample(self) -> Tensor:
        """[B] int64, the sample of the prompt."""
        return torch.tensor([identity.sample for identity in self.identity], device=self.group.device)
