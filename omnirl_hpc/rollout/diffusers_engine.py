"""The reference engine: diffusers' stock pipeline, with our scheduler in place of its own."""

from __future__ import annotations

from typing import Iterator, Sequence

import torch
from torch import Tensor

from omnirl_hpc.config.schema import Config
from omnirl_hpc.hashing import state_checksum
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.models import ModelFamily
from omnirl_hpc.models.lora import add_lora, lora_modules, lora_parameters
from omnirl_hpc.rollout.batching import micro_batches
from omnirl_hpc.rollout.engine import LoraReceipt, SampleRequest
from omnirl_hpc.sampling.noise import INITIAL_NOISE, TRANSITION_NOISE, standard_normal
from omnirl_hpc.sampling.recorder import Recording, RecordingScheduler
from omnirl_hpc.sampling.trajectories import TextEmbeds, Trajectories, pad_text


class DiffusersEngine:
    """See RolloutEngine."""

    def __init__(self, config: Config, family: ModelFamily, device: torch.device, timer: PhaseTimer) -> None:
        self._config = config
        self._family = family
        self._device = device
        self._timer = timer
        self._schedule = family.make_schedule(config.sampling.num_inference_steps)
        dtype = getattr(torch, config.rollout.dtype)
        self._pipeline = family.load_pipeline(dtype)
        targets = config.actor.lora.target_modules or family.lora_targets
        add_lora(self._pipeline.transformer, config.actor.lora, targets, dtype, config.seed)
        self._pipeline.to(device)
        self._pipeline.scheduler = RecordingScheduler.make(
            self._pipeline.scheduler.config, self._schedule, config.sampling.transition, config.sampling.noise_level
        )
        self._version = -1

    @torch.no_grad()
    def encode(self, prompt: str) -> Tensor:
        return self._family.encode_prompt(self._pipeline, prompt)

    @torch.no_grad()
    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[Trajectories]:
        for batch, count in micro_batches(requests, self._config.rollout.micro_batch_size):
            text = self._pad([request.text for request in batch], batch[0].text_length)
            negative = None
            if batch[0].negative is not None:
                negative = self._pad([request.negative for request in batch], batch[0].text_length)
            recording = self._sample(batch, text, negative)
            with self._timer.phase("decode"):
                images = self._family.decode(self._pipeline.vae, recording.final)
            yield self._trajectories(batch, text, negative, recording, images)[:count]

    @torch.no_grad()
    def load_lora(self, state: dict[str, Tensor], version: int) -> LoraReceipt:
        slots = lora_parameters(self._pipeline.transformer)
        for name, tensor in state.items():
            if name in slots:
                slots[name].copy_(tensor)
        self._version = version
        return LoraReceipt(version, frozenset(lora_modules(slots)), state_checksum(slots))

    def _pad(self, embeds: list[Tensor], length: int) -> TextEmbeds:
        return torch.cat([pad_text(e, length) for e in embeds]).to(self._device)

    def _sample(self, batch: list[SampleRequest], text: TextEmbeds, negative: TextEmbeds | None) -> Recording:
        """Run the stock pipeline once."""
        shape, seed = self._family.latent_shape(), self._config.seed
        initial = torch.stack(
            [standard_normal(shape, seed, INITIAL_NOISE, r.step, r.prompt_id, r.sample) for r in batch]
        ).to(self._device)
        noise = torch.stack(
            [
                torch.stack(
                    [
                        standard_normal(shape, seed, TRANSITION_NOISE, r.step, r.prompt_id, r.sample, i)
                        for i in range(r.window.start, r.window.start + r.window.size)
                    ]
                )
                for r in batch
            ]
        ).to(self._device)
        recorder = self._pipeline.scheduler
        recorder.begin(initial, [r.window for r in batch], noise)
        self._pipeline(
            **self._family.pipeline_inputs(text, negative, self._config.sampling.true_cfg_scale),
            latents=initial,
            num_inference_steps=self._schedule.num_steps,
            output_type="latent",
        )
        return recorder.finish()

    def _trajectories(
        self, batch: list[SampleRequest], text: TextEmbeds, negative: TextEmbeds | None, recording: Recording, images: Tensor
    ) -> Trajectories:
        edges = torch.tensor([[*range(r.window.start, r.window.start + r.window.size + 1)] for r in batch])
        whole = {"dtype": torch.int64, "device": self._device}
        return Trajectories(
            latents=recording.latents,
            log_probs=recording.log_probs,
            sigmas=self._schedule.sigmas[edges].to(self._device),
            timesteps=self._schedule.timesteps[edges[:, :-1]].to(self._device),
            sigma_max=torch.full((len(batch),), self._schedule.sigma_max, device=self._device),
            text=text,
            negative=negative,
            images=images,
            group=torch.tensor([r.group for r in batch], **whole),
            sample=torch.tensor([r.sample for r in batch], **whole),
            version=torch.full((len(batch),), self._version, **whole),
            batch_size=[len(batch)],
        )
