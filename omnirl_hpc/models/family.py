"""What a model family provides, and how its pipelines are driven.

A sample's latents are named streams, fp32 between denoising steps; everything else that the model reads is a
condition, whose tensors are the family's own business.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from packaging.version import Version
from torch import Tensor, nn

from omnirl_hpc.config.schema import ModelConfig, SamplingConfig
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.errors import ConfigError, DataError
from omnirl_hpc.models.spec import FamilySpec, Guidance, Numerics
from omnirl_hpc.sampling.recorder import Recorder
from omnirl_hpc.sampling.samples import Condition, Media
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.scheduler_face import SchedulerFace
from omnirl_hpc.sampling.streams import Streams

# from_pretrained's argument was renamed: 0.38 knows only the old name, 0.40 warns of it
DTYPE = "dtype" if Version(diffusers.__version__) >= Version("0.40") else "torch_dtype"


class ModelFamily(ABC):
    """One family, bound to a checkpoint and a size of images or videos."""

    spec: FamilySpec  # what it is, without torch; a family of ours has it in spec.py beside it

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @abstractmethod
    def driver(self, engine: str) -> PipelineDriver:
        """How the pipeline of an engine (rollout.engine) is driven."""

    def load_pipeline(self, dtype: torch.dtype) -> Any:
        """diffusers' stock pipeline, on the CPU."""
        return self._load(dtype)

    def load_encoders(self, dtype: torch.dtype) -> Any:
        """The same pipeline without its denoising network, for `encode` and `encode_media`."""
        return self._load(dtype, transformer=None)

    def _load(self, dtype: torch.dtype, **components: None) -> Any:
        pipeline = getattr(diffusers, self.spec.pipeline_classes[0]).from_pretrained(
            self.config.path, **{DTYPE: dtype}, **components, local_files_only=True
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        """The denoising network alone, on the CPU."""
        return self.transformer_class.from_pretrained(
            self.config.path, subfolder="transformer", **{DTYPE: dtype}, local_files_only=True
        )

    def empty_transformer(self, dtype: torch.dtype) -> nn.Module:
        """The same with its parameters on the meta device, and all that is no parameter as it is to be.

        The actor reads the parameters from the folder `transformer` of the checkpoint, each rank its part.
        """
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # as from_pretrained does
        try:
            with init_empty_weights(include_buffers=False):
                transformer = self.transformer_class.from_config(self.component_config("transformer")).eval()
        finally:
            torch.set_default_dtype(usual)
        stored = transformer.state_dict().keys()
        for name, buffer in transformer.named_buffers():
            if name in stored and buffer.is_floating_point():  # from_pretrained casts what it reads
                buffer.data = buffer.data.to(dtype)
        return transformer

    def component_config(self, component: str) -> dict[str, Any]:
        """The settings in a component's file."""
        name = "scheduler_config.json" if component == "scheduler" else "config.json"
        return json.loads((Path(self.config.path) / component / name).read_text())

    @property
    def transformer_class(self) -> Any:
        """The denoising network's, one of diffusers' or with the same methods."""
        return getattr(diffusers, self.spec.components["transformer"].classes[0])

    @abstractmethod
    def schedules(self, num_steps: int) -> dict[str, Schedule]:
        """The schedule of each stream, all of `num_steps` steps, from the checkpoint's scheduler file."""

    @abstractmethod
    def stream_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one sample's latents in each stream."""

    def expert_at(self, step: int, num_steps: int) -> int:
        """Which network makes a denoising step, where several take turns."""
        return 0

    @abstractmethod
    def count_text_tokens(self, text: str) -> int:
        """Tokens of a prompt, from the tokenizer alone. Raises DataError above `spec.max_text_tokens`."""

    def longest_text(self, widths: Sequence[int]) -> int:
        """The most tokens that a prompt may have. widths: data.text_lengths."""
        return self.spec.max_text_tokens if self.spec.text_width else widths[-1] - 1

    def condition_width(self, texts: Sequence[str], widths: Sequence[int]) -> int:
        """The width that the conditions of these texts are padded to. Raises DataError where none holds them.

        Where the family has none of its own, it is the smallest of `widths` (data.text_lengths) that is
        greater than every number of tokens. Greater, not equal: at least one token of padding keeps an
        attention mask in every batch. Pipelines drop a mask of all ones and then take another kernel, which
        would make a sample's value depend on its neighbours.
        """
        longest = max(self.count_text_tokens(text) for text in texts)
        if self.spec.text_width:
            return self.spec.text_width
        for width in widths:
            if width > longest:
                return width
        raise DataError(
            f"no width in data.text_lengths={list(widths)} holds {longest} tokens and one of padding"
        )

    @abstractmethod
    def pad(self, condition: Condition, width: int) -> Condition:
        """A condition at `width`, with what tells padding from content. Raises ValueError where it does not
        fit: no truncation.
        """

    def guidance(self, sampling: SamplingConfig) -> Guidance:
        """The scales that the settings ask for."""
        return Guidance({"text": sampling.true_cfg_scale})

    @abstractmethod
    def velocity(
        self,
        transformer: Callable[..., Any],
        latents: Streams,
        timesteps: Streams,
        conditions: dict[str, Tensor],
        negative: dict[str, Tensor] | None,
        guidance: Guidance,
        numerics: Numerics,
    ) -> Streams:
        """The guided velocity of each stream, shaped as its latents, computed as the engine computes it, with
        gradients.

        latents [B, …] fp32, timesteps [B] fp32 as in Schedule, conditions [B, …] in the dtype to compute in.
        """

    def encode_media(self, pipeline: Any, media: Media) -> Streams:
        """The inverse of `decode`: clean latents [B, …] of what people see and hear. Raises ConfigError for a
        family that has no such encoder.
        """
        raise ConfigError(f"{type(self).__name__} cannot encode images: give latents instead")

    @abstractmethod
    def decode(self, pipeline: Any, latents: Streams) -> Media:
        """What clean latents [B, …] look and sound like. On the pipeline's device."""


class PipelineDriver(ABC):
    """Knows the stock pipeline of one engine. No pipeline is changed but for its scheduler or the method that
    stands for it.
    """

    def __init__(self, family: ModelFamily) -> None:
        self.family = family

    def components(self, pipeline: Any) -> dict[str, nn.Module]:
        """Everything that has weights: to be cast, pinned, put to sleep."""
        return {name: getattr(pipeline, name) for name in self.family.spec.modules}

    def attach(self, pipeline: Any, recorder: Recorder) -> None:
        """Let the recorder make the pipeline's steps from now on."""
        pipeline.scheduler = SchedulerFace(recorder, pipeline.scheduler.config)

    @abstractmethod
    def encode(self, pipeline: Any, prompt: Prompt) -> Condition:
        """The condition of one prompt, unpadded, in the encoders' dtype and on their device."""

    @abstractmethod
    def denoise(
        self,
        pipeline: Any,
        initial: Streams,
        conditions: dict[str, Tensor],
        negative: dict[str, Tensor] | None,
        guidance: Guidance,
        num_steps: int,
    ) -> None:
        """Run the pipeline's loop on a batch for which the recorder has begun.

        initial [B, …] fp32 noise, conditions [B, …] padded, negative None without guidance.
        """


class DiffusersDriver(PipelineDriver):
    """For diffusers' stock pipeline."""

    def load(self, dtype: torch.dtype) -> Any:
        """The pipeline, on the CPU."""
        return self.family.load_pipeline(dtype)


class VllmOmniDriver(PipelineDriver):
    """For vLLM-Omni's stock pipeline. It may import vllm_omni inside of its methods: the engine has prepared
    that.
    """

    def engine_options(self) -> dict[str, Any]:
        """Arguments of OmniDiffusionConfig beyond those that settings decide."""
        return {}
