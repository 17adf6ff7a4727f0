"""The vLLM-Omni engine: its stock pipeline with our scheduler in place of its own, in this process, on our
process groups.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from omnirl_hpc.config.schema import Config
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.errors import EngineError
from omnirl_hpc.hashing import state_checksum
from omnirl_hpc.layout import Layout
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.models.family import DenoisingInputs, ModelFamily, VllmOmniDriver
from omnirl_hpc.models.lora import lora_modules
from omnirl_hpc.rollout.batching import micro_batches
from omnirl_hpc.rollout.engine import Receipt, SampleRequest
from omnirl_hpc.rollout.vllm_omni.importing import import_vllm_omni
from omnirl_hpc.rollout.vllm_omni.sleep import SleepingWeights
from omnirl_hpc.sampling.recorder import Recorder
from omnirl_hpc.sampling.samples import Condition, Media, Samples
from omnirl_hpc.sampling.streams import Streams

if TYPE_CHECKING:  # imports vllm
    from omnirl_hpc.rollout.vllm_omni.lora import EngineLora

log = logging.getLogger(__name__)


class VllmOmniEngine:
    """See RolloutEngine. All ranks of the job construct it together; the ranks of a replica call its methods
    together.
    """

    def __init__(
        self, config: Config, family: ModelFamily, layout: Layout, device: torch.device, timer: PhaseTimer
    ) -> None:
        log.info("rollout engine: %s", import_vllm_omni(device))
        self._config = config
        self._family = family
        self._device = device
        self._timer = timer
        self._guidance = family.guidance(config.sampling)
        self._version = -1
        self.micro_batch_size = config.rollout.micro_batch_size
        # These import vllm, which comes after its environment is prepared.
        from omnirl_hpc.rollout.vllm_omni.loading import keeps_host_copy, make_worker

        self._driver = cast(VllmOmniDriver, family.driver("vllm_omni"))
        self._worker = make_worker(config, self._driver, layout, device)
        self._pipeline = self._worker.model_runner.pipeline
        self._recorder = Recorder(config.sampling.transition, config.sampling.noise_level)
        self._driver.attach(self._pipeline, self._recorder)
        self._weights: SleepingWeights | None = None
        if keeps_host_copy(config):
            self._weights = SleepingWeights(self._pipeline, config.rollout.awake, device)
            self._weights.save()  # pinning tens of GiB takes a minute: now, not in the first step
        self._lora = self._make_lora() if config.actor.train == "lora" else None

    def _make_lora(self) -> EngineLora:
        from omnirl_hpc.rollout.vllm_omni.lora import AdapterLora, MergedLora

        config = self._config
        if config.rollout.lora == "merged":
            assert self._weights is not None  # keeps_host_copy
            return MergedLora(self._pipeline.transformer, config.actor.lora, self._weights.clean)
        targets = config.actor.lora.target_modules or self._family.spec.lora_targets
        return AdapterLora(self._worker.lora_manager, config.actor.lora, targets)

    @property
    def transformer(self) -> nn.Module:
        return self._pipeline.transformer

    def encode(self, prompt: Prompt) -> Condition:
        self._require_awake()
        with self._forward_context():
            condition = self._driver.encode(self._pipeline, prompt)
        # Copies: a tensor of inference mode cannot enter autograd. Upstream may load an encoder in another
        # dtype.
        dtype = getattr(torch, self._config.rollout.dtype)
        return {
            name: tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
            for name, tensor in condition.items()
        }

    def generate(
        self, requests: Sequence[SampleRequest], num_steps: int | None = None, media: bool = True
    ) -> Iterator[Samples]:
        self._require_awake()
        num_steps = num_steps or self._config.sampling.num_inference_steps
        schedules = self._family.schedules(num_steps)
        if self._lora is not None:
            self._lora.prepare()
        for batch, count in micro_batches(requests, self.micro_batch_size, self._family, self._device):
            self._recorder.begin(batch.initial, batch.windows, batch.noise, schedules)
            with self._forward_context():
                inputs = DenoisingInputs(
                    batch.initial, *batch.stacked_conditions(), self._guidance, num_steps
                )
                self._driver.denoise(self._pipeline, inputs)
            recording = self._recorder.finish()
            decoded = self._decode(recording.final) if media else None
            yield batch.samples(recording, decoded, self._family, schedules, self._version)[:count]

    def _decode(self, latents: Streams) -> Media:
        with self._timer.phase("decode"):
            with self._forward_context():
                media = self._family.decode(self._pipeline, latents)
            return media.on_host()

    def load_lora(self, state: dict[str, Tensor], version: int) -> Receipt:
        self._require_awake()
        assert self._lora is not None  # actor.train=lora
        self._lora.write(state)
        self._version = version
        found = self._lora.read_back(state)
        return Receipt(version, frozenset(lora_modules(found)), state_checksum(found))

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        transformer = self._pipeline.transformer
        with nullcontext() if self._weights is None else self._weights.rewriting(transformer):
            transformer.load_weights(weights)  # upstream's own: it knows fused layers and the rank's share
        self._version = version

    def held_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        from omnirl_hpc.rollout.vllm_omni.weights import read_weights

        self._require_awake()
        return read_weights(self._pipeline.transformer, names)

    def sleep(self) -> None:
        if self._weights is None:
            raise EngineError(
                "the engine was made to stay on the device (residency=resident) and cannot sleep"
            )
        self._require_awake()
        self._weights.sleep()

    def wake(self) -> None:
        if self._weights is not None and self._weights.asleep:
            self._weights.wake()
            if self._lora is not None:
                self._lora.weights_restored()

    def close(self) -> None:
        """Let go of the model. The default process group is the host's, and its subgroups live as long as it
        does.
        """
        self._worker.shutdown()

    def _require_awake(self) -> None:
        if self._weights is not None and self._weights.asleep:
            raise EngineError("the rollout engine is asleep: wake it before using it")

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        """What the worker sets around a pipeline call."""
        from vllm_omni.diffusion.forward_context import set_forward_context

        context = set_forward_context(
            vllm_config=self._worker.vllm_config, omni_diffusion_config=self._worker.od_config
        )
        with torch.inference_mode(), context:
            yield
