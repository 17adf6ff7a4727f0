"""The reference engine: diffusers' stock pipeline, with our scheduler in place of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from omnirl_hpc.config.schema import Config
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.hashing import state_checksum
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.models.family import DenoisingInputs, DiffusersDriver, ModelFamily
from omnirl_hpc.models.lora import add_lora, lora_modules, lora_parameters
from omnirl_hpc.pinned import PinnedTensors
from omnirl_hpc.rollout.batching import micro_batches
from omnirl_hpc.rollout.engine import Receipt, SampleRequest
from omnirl_hpc.sampling.recorder import Recorder
from omnirl_hpc.sampling.samples import Condition, Media, Samples
from omnirl_hpc.sampling.streams import Streams


class DiffusersEngine:
    """See RolloutEngine."""

    def __init__(self, config: Config, family: ModelFamily, device: torch.device, timer: PhaseTimer) -> None:
        self._config = config
        self._family = family
        self._device = device
        self._timer = timer
        self._guidance = family.guidance(config.sampling)
        self._version = -1
        self.micro_batch_size = config.rollout.micro_batch_size
        dtype = getattr(torch, config.rollout.dtype)
        self._driver = cast(DiffusersDriver, family.driver("diffusers"))
        self._pipeline = self._driver.load(dtype)
        if config.actor.train == "lora":
            targets = config.actor.lora.target_modules or family.spec.lora_targets
            add_lora(self._pipeline.transformer, config.actor.lora, targets, dtype, config.seed)
        self._pipeline.to(device)
        self._recorder = Recorder(config.sampling.transition, config.sampling.noise_level)
        self._driver.attach(self._pipeline, self._recorder)
        self._pinned = PinnedTensors()
        slots = list(lora_parameters(self._pipeline.transformer).values())
        self._pinned.add(slots, frozen=False)
        for module in self._driver.components(self._pipeline).values():
            self._pinned.add([*module.parameters(), *module.buffers()], frozen=True)

    def sleep(self) -> None:
        self._require_awake()
        self._pinned.offload()

    def wake(self) -> None:
        self._pinned.onload()

    def close(self) -> None:
        del self._pipeline

    def _require_awake(self) -> None:
        if self._pinned.offloaded:
            raise RuntimeError("the engine is asleep: wake() it before use")

    @property
    def transformer(self) -> nn.Module:
        return self._pipeline.transformer

    @torch.no_grad()
    def encode(self, prompt: Prompt) -> Condition:
        self._require_awake()
        return self._driver.encode(self._pipeline, prompt)

    @torch.no_grad()
    def generate(
        self, requests: Sequence[SampleRequest], num_steps: int | None = None, media: bool = True
    ) -> Iterator[Samples]:
        self._require_awake()
        num_steps = num_steps or self._config.sampling.num_inference_steps
        schedules = self._family.schedules(num_steps)
        for batch, count in micro_batches(requests, self.micro_batch_size, self._family, self._device):
            self._recorder.begin(batch.initial, batch.windows, batch.noise, schedules)
            inputs = DenoisingInputs(batch.initial, *batch.stacked_conditions(), self._guidance, num_steps)
            self._driver.denoise(self._pipeline, inputs)
            recording = self._recorder.finish()
            decoded = self._decode(recording.final) if media else None
            yield batch.samples(recording, decoded, self._family, schedules, self._version)[:count]

    def _decode(self, latents: Streams) -> Media:
        with self._timer.phase("decode"):
            return self._family.decode(self._pipeline, latents).on_host()

    @torch.no_grad()
    def load_lora(self, state: dict[str, Tensor], version: int) -> Receipt:
        self._require_awake()
        slots = lora_parameters(self._pipeline.transformer)
        for name in slots.keys() & state.keys():
            slots[name].copy_(state[name])
        self._version = version
        return Receipt(version, frozenset(lora_modules(slots)), state_checksum(slots))

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        places = dict(self._pipeline.transformer.named_parameters())
        with self._pinned.rewriting(places.values()):
            for name, tensor in weights:
                if name in places:
                    places[name].copy_(tensor)
        self._version = version

    def held_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        self._require_awake()
        return (
            (name, parameter.detach()) for name, parameter in self._pipeline.transformer.named_parameters()
        )
