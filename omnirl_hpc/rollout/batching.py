"""Sample requests -> micro-batches of tensors, and back to samples: what every engine shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from omnirl_hpc.config.schema import Config
from omnirl_hpc.hashing import tensor_checksum
from omnirl_hpc.layout import Layout
from omnirl_hpc.models.family import ModelFamily
from omnirl_hpc.rollout.engine import SampleRequest
from omnirl_hpc.sampling.noise import INITIAL_NOISE, TRANSITION_NOISE, standard_normal
from omnirl_hpc.sampling.recorder import Recording
from omnirl_hpc.sampling.samples import Condition, Media, Samples, Trajectory, stack_conditions
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import Streams, stream_address
from omnirl_hpc.sampling.windows import Window


@dataclass(frozen=True)
class SampleBatch:
    """The inputs of one pipeline call for B samples, on the engine's device."""

    requests: list[SampleRequest]
    conditions: list[Condition]  # padded
    negative: list[Condition] | None
    initial: Streams  # [B, …] fp32
    noise: Streams  # [B, W, …] fp32, for the steps of each sample's window
    noise_hash: Tensor  # [B] int64, of both

    @property
    def windows(self) -> list[Window]:
        return [request.window for request in self.requests]

    def stacked_conditions(self) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        """Conditions [B, …], and the negative ones."""
        negative = None if self.negative is None else stack_conditions(self.negative)
        return stack_conditions(self.conditions), negative

    def samples(
        self,
        recording: Recording,
        media: Media | None,
        family: ModelFamily,
        schedules: dict[str, Schedule],
        version: int,
    ) -> Samples:
        """What the pipeline call produced, as training reads it."""
        device = self.noise_hash.device
        whole: dict[str, Any] = {"dtype": torch.int64, "device": device}
        return Samples(
            identity=[request.identity for request in self.requests],
            group=torch.tensor([request.group for request in self.requests], **whole),
            conditions=self.conditions,
            negative=self.negative,
            clean=recording.final,
            version=torch.full((len(self.requests),), version, **whole),
            noise_hash=self.noise_hash,
            media=media,
            trajectory=self._trajectory(recording, family, schedules, device)
            if self.windows[0].size
            else None,
        )

    def _trajectory(
        self,
        recording: Recording,
        family: ModelFamily,
        schedules: dict[str, Schedule],
        device: torch.device,
    ) -> Trajectory:
        edges = torch.tensor([[*range(w.start, w.start + w.size + 1)] for w in self.windows])
        num_steps = next(iter(schedules.values())).num_steps
        experts = torch.tensor([family.expert_at(step, num_steps) for step in range(num_steps)])
        return Trajectory(
            latents=recording.latents,
            log_probs=recording.log_probs,
            sigmas={name: schedule.sigmas[edges].to(device) for name, schedule in schedules.items()},
            timesteps={
                name: schedule.timesteps[edges[:, :-1]].to(device) for name, schedule in schedules.items()
            },
            sigma_max={
                name: torch.full((len(self.requests),), schedule.sigma_max, device=device)
                for name, schedule in schedules.items()
            },
            expert=experts[edges[:, :-1]].to(device),
        )


def micro_batches(
    requests: Sequence[SampleRequest], size: int, family: ModelFamily, device: torch.device
) -> Iterator[tuple[SampleBatch, int]]:
    """Consecutive batches of exactly `size` samples, each with the number of real ones.

    The last batch is padded with its own last sample. Every kernel then sees one shape, so that a sample's
    value does not depend on how many others are generated with it.
    """
    padded: dict[tuple[int, int], Condition] = {}

    def pad(condition: Condition, width: int) -> Condition:
        """On the device, one object for all samples that share a condition: the requests keep it alive."""
        key = id(condition), width
        if key not in padded:
            on_device = {name: tensor.to(device) for name, tensor in condition.items()}
            padded[key] = family.pad(on_device, width)
        return padded[key]

    for start in range(0, len(requests), size):
        batch = list(requests[start : start + size])
        count = len(batch)
        batch += [batch[-1]] * (size - count)
        guided = batch[0].negative is not None
        noise = _draw_noise(batch, family.stream_shapes(), device)
        yield (
            SampleBatch(
                batch,
                [pad(request.condition, request.width) for request in batch],
                [pad(cast(Condition, request.negative), request.width) for request in batch]
                if guided
                else None,
                *noise,
            ),
            count,
        )


def _draw_noise(
    requests: list[SampleRequest], shapes: dict[str, tuple[int, ...]], device: torch.device
) -> tuple[Streams, Streams, Tensor]:
    """Initial noise, that of the transitions, and [B] hashes of both."""
    initial: Streams = {}
    steps: Streams = {}
    hashes = [0] * len(requests)
    for stream, shape in shapes.items():
        first = [_normal(request, stream, shape, INITIAL_NOISE) for request in requests]
        further = [_transition_noise(request, stream, shape) for request in requests]
        hashes = [
            (known + tensor_checksum(i) + 3 * tensor_checksum(s)) % 2**62
            for known, i, s in zip(hashes, first, further)
        ]
        initial[stream], steps[stream] = torch.stack(first).to(device), torch.stack(further).to(device)
    return initial, steps, torch.tensor(hashes, device=device)


def _transition_noise(request: SampleRequest, stream: str, shape: tuple[int, ...]) -> Tensor:
    """[W, …] for the steps of the window."""
    steps = range(request.window.start, request.window.start + request.window.size)
    draws = [_normal(request, stream, shape, TRANSITION_NOISE, step) for step in steps]
    return torch.stack(draws) if draws else torch.empty(0, *shape)


def _normal(request: SampleRequest, stream: str, shape: tuple[int, ...], purpose: str, *place: int) -> Tensor:
    return standard_normal(shape, *request.identity.address(purpose, *stream_address(stream), *place))


def describe_padding(config: Config, layout: Layout) -> str | None:
    """A sentence where a replica has fewer samples than a micro-batch of a rollout, so that it is padded."""
    size, replicas = config.rollout.micro_batch_size, layout.num_replicas
    samples = config.data.prompts_per_step * config.data.samples_per_prompt // replicas
    if size <= samples:
        return None
    return (
        f"rollout.micro_batch_size={size} is more than the {samples} samples of a replica "
        "(data.prompts_per_step "
        f"x data.samples_per_prompt / {replicas} replicas): each step computes {size - samples} for nothing"
    )
