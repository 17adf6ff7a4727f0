"""Sample requests -> micro-batches of tensors, and back to trajectories: what every engine shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omnirl_hpc.config.schema import Config
from omnirl_hpc.hashing import tensor_checksum
from omnirl_hpc.layout import Layout
from omnirl_hpc.rollout.engine import SampleRequest
from omnirl_hpc.sampling.noise import INITIAL_NOISE, TRANSITION_NOISE, standard_normal
from omnirl_hpc.sampling.recorder import Recording
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.trajectories import TextEmbeds, Trajectories, pad_text
from omnirl_hpc.sampling.windows import Window


@dataclass(frozen=True)
class SampleBatch:
    """The inputs of one pipeline call for B samples, on the engine's device."""

    requests: list[SampleRequest]
    text: TextEmbeds  # [B, L, D]
    negative: TextEmbeds | None
    initial: Tensor  # [B, S, C] fp32
    noise: Tensor  # [B, W, S, C] fp32, for the steps of each sample's window
    noise_hash: Tensor  # [B] int64, of both

    @property
    def windows(self) -> list[Window]:
        return [request.window for request in self.requests]

    def trajectories(
        self, recording: Recording, images: Tensor, schedule: Schedule, version: int
    ) -> Trajectories:
        """What the pipeline call produced, as training reads it."""
        device = self.initial.device
        edges = torch.tensor([[*range(w.start, w.start + w.size + 1)] for w in self.windows])
        whole = {"dtype": torch.int64, "device": device}
        return Trajectories(
            latents=recording.latents,
            log_probs=recording.log_probs,
            sigmas=schedule.sigmas[edges].to(device),
            timesteps=schedule.timesteps[edges[:, :-1]].to(device),
            sigma_max=torch.full((len(self.requests),), schedule.sigma_max, device=device),
            text=self.text,
            negative=self.negative,
            images=images,
            group=torch.tensor([r.group for r in self.requests], **whole),
            sample=torch.tensor([r.sample for r in self.requests], **whole),
            noise_hash=self.noise_hash,
            version=torch.full((len(self.requests),), version, **whole),
            batch_size=[len(self.requests)],
        )


def micro_batches(
    requests: Sequence[SampleRequest], size: int, latent_shape: tuple[int, int], device: torch.device
) -> Iterator[tuple[SampleBatch, int]]:
    """Consecutive batches of exactly `size` samples, each with the number of real ones.

    The last batch is padded with its own last sample. Every kernel then sees one shape, so that a sample's
    value does not depend on how many others are generated with it.
    """
    for start in range(0, len(requests), size):
        batch = list(requests[start : start + size])
        count = len(batch)
        batch += [batch[-1]] * (size - count)
        yield _to_tensors(batch, latent_shape, device), count


def _to_tensors(requests: list[SampleRequest], shape: tuple[int, int], device: torch.device) -> SampleBatch:
    def noise(request: SampleRequest, purpose: str, *place: int) -> Tensor:
        return standard_normal(
            shape, request.seed, purpose, request.step, request.prompt_id, request.sample, *place
        )

    def transition_noise(request: SampleRequest) -> Tensor:
        window = request.window
        draws = [noise(request, TRANSITION_NOISE, i) for i in range(window.start, window.start + window.size)]
        return torch.stack(draws) if draws else torch.empty(0, *shape)

    def pad(embeds: list[Tensor]) -> TextEmbeds:
        return torch.cat([pad_text(e, r.text_length) for e, r in zip(embeds, requests)]).to(device)

    initial, steps = [noise(r, INITIAL_NOISE) for r in requests], [transition_noise(r) for r in requests]
    hashes = [(tensor_checksum(i) + 3 * tensor_checksum(s)) % 2**62 for i, s in zip(initial, steps)]
    return SampleBatch(
        requests=requests,
        text=pad([r.text for r in requests]),
        negative=None if requests[0].negative is None else pad([r.negative for r in requests]),
        initial=torch.stack(initial).to(device),
        noise=torch.stack(steps).to(device),
        noise_hash=torch.tensor(hashes, device=device),
    )


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
