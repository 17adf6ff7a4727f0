"""What a model family provides, and how its pipelines are driven.

A sample's latents are named streams, fp32 between denoising steps; everything else that the model reads is a
condition, whose tensors are the family's own business.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import torch
from accelerate import init_empty_weights
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoTokenizer

from omnirl_hpc.config.schema import ModelConfig, SamplingConfig
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.errors import ConfigError, DataError
from omnirl_hpc.models.spec import FamilySpec, Guidance, Numerics
from omnirl_hpc.sampling.recorder import Recorder
from omnirl_hpc.sampling.samples import Condition, Media
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.scheduler_face import SchedulerFace
from omnirl_hpc.sampling.streams import Streams, map_streams

# from_pretrained's argument was renamed: 0.38 knows only the old name, 0.40 warns of it
DTYPE = "dtype" if Version(diffusers.__version__) >= Version("0.40") else "torch_dtype"


class ModelFamily(ABC):
    """One family, bound to a checkpoint and a size of images or videos."""

    spec: FamilySpec  # what it is, without torch; a family of ours has it in spec.py beside it
    # Of the two branches of guidance in one batch. diffusers' pipelines that batch them begin with the other
    # one, and a row's place in a batch may decide how it is rounded.
    conditional_first: ClassVar[bool] = False

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @abstractmethod
    def driver(self, engine: str) -> PipelineDriver:
        """How the pipeline of an engine (rollout.engine) is driven."""

    def load_pipeline(self, dtype: torch.dtype) -> Any:
        """diffusers' stock pipeline, on the CPU."""
        return self._load(dtype)

    def load_encoders(self, dtype: torch.dtype) -> Any:
        """The same pipeline without its denoising networks, for `encode` and `encode_media`."""
        return self._load(dtype, **dict.fromkeys(self.spec.experts))

    def _load(self, dtype: torch.dtype, **components: None) -> Any:
        pipeline = getattr(diffusers, self.spec.pipeline_classes[0]).from_pretrained(
            self.config.path, **{DTYPE: dtype}, **components, local_files_only=True
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def load_transformer(self, dtype: torch.dtype, expert: str = "transformer") -> nn.Module:
        """A denoising network alone, on the CPU."""
        return self.transformer_class.from_pretrained(
            self.config.path, subfolder=expert, **{DTYPE: dtype}, local_files_only=True
        )

    def empty_transformer(self, dtype: torch.dtype, expert: str = "transformer") -> nn.Module:
        """The same with its parameters on the meta device, and all that is no parameter as it is to be.

        The actor reads the parameters from the folder `expert` of the checkpoint, each rank its part.
        """
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # as from_pretrained does
        try:
            with init_empty_weights(include_buffers=False):
                transformer = self.transformer_class.from_config(self.component_config(expert)).eval()
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
        """The denoising networks', one of diffusers' or with the same methods."""
        return getattr(diffusers, self.spec.components["transformer"].classes[0])

    @abstractmethod
    def schedules(self, num_steps: int) -> dict[str, Schedule]:
        """The schedule of each stream, all of `num_steps` steps, from the checkpoint's scheduler file."""

    @abstractmethod
    def stream_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one sample's latents in each stream."""

    def experts_at(self, timesteps: Streams) -> Tensor:
        """[B] int64, which of `spec.experts` the model is at timesteps [B], where several take turns."""
        return torch.zeros_like(next(iter(timesteps.values())), dtype=torch.int64)

    @cached_property
    def tokenizer(self) -> Any:
        """The one that decides how long a prompt is."""
        folder = Path(self.config.path) / self.spec.tokenizer
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def tokenized_length(self, text: str) -> int:
        """Tokens of a prompt, however many, from the tokenizer alone."""
        return len(self.tokenizer(text).input_ids)

    def count_text_tokens(self, text: str) -> int:
        """The same. Raises DataError above `spec.max_text_tokens`."""
        tokens, most = self.tokenized_length(text), self.spec.max_text_tokens
        if tokens > most:
            raise DataError(
                f"a prompt of {tokens} tokens is longer than {self.spec.title}'s {most}: {text[:60]!r}…"
            )
        return tokens

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
        if negative is None:
            return self.predict(transformer, latents, timesteps, conditions, numerics)
        if numerics.batched_cfg:
            branches = (conditions, negative) if self.conditional_first else (negative, conditions)
            both = {name: torch.cat([branch[name] for branch in branches]) for name in conditions}
            made = self.predict(transformer, _twice(latents), _twice(timesteps), both, numerics)
            first, second = ({name: v.chunk(2)[i] for name, v in made.items()} for i in range(2))
            positive, unconditional = (first, second) if self.conditional_first else (second, first)
        else:
            positive = self.predict(transformer, latents, timesteps, conditions, numerics)
            unconditional = self.predict(transformer, latents, timesteps, negative, numerics)
        return self.guide(positive, unconditional, guidance)

    @abstractmethod
    def predict(
        self,
        transformer: Callable[..., Any],
        latents: Streams,
        timesteps: Streams,
        conditions: dict[str, Tensor],
        numerics: Numerics,
    ) -> Streams:
        """The velocity of each stream under these conditions: one branch of guidance, or all of it. Shapes as
        in `velocity`.
        """

    def guide(self, positive: Streams, unconditional: Streams, guidance: Guidance) -> Streams:
        """Classifier-free guidance (arXiv 2207.12598) of the velocities of both branches, [B, …] each."""
        scale = guidance.scales["text"]
        return map_streams(lambda c, u: u + scale * (c - u), positive, unconditional)

    def encode_media(self, pipeline: Any, media: Media) -> Streams:
        """The inverse of `decode`: clean latents [B, …] of what people see and hear. Raises ConfigError for a
        family that has no such encoder.
        """
        raise ConfigError(f"{type(self).__name__} cannot encode images: give latents instead")

    @abstractmethod
    def decode(self, pipeline: Any, latents: Streams) -> Media:
        """What clean latents [B, …] look and sound like. On the pipeline's device."""


def _twice(streams: Streams) -> Streams:
    return map_streams(lambda x: torch.cat([x, x]), streams)


def as_pixels(images: Tensor) -> Tensor:
    """What a decoder makes, in [-1, 1] but for overshoots, as uint8."""
    return (images.float() / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)


@dataclass(frozen=True)
class DenoisingInputs:
    """What a pipeline's loop runs on: a batch of B samples."""

    initial: Streams  # [B, …] fp32 noise
    conditions: dict[str, Tensor]  # [B, …], padded
    negative: dict[str, Tensor] | None  # None: no guidance
    guidance: Guidance
    num_steps: int


class PipelineDriver(ABC):
    """Knows the stock pipeline of one engine. No pipeline is changed but for its scheduler or the method that
    stands for it.
    """

    engine: ClassVar[str]  # its name in rollout.engine

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
    def denoise(self, pipeline: Any, inputs: DenoisingInputs) -> None:
        """Run the pipeline's loop on a batch for which the recorder has begun."""


class LoopDriver(PipelineDriver):
    """For a family whose pipelines offer no place to make their steps: a loop of our own around their
    network, the same for both engines.
    """

    _recorder: Recorder

    def attach(self, pipeline: Any, recorder: Recorder) -> None:
        self._recorder = recorder

    def denoise(self, pipeline: Any, inputs: DenoisingInputs) -> None:
        latents, numerics = dict(inputs.initial), self.family.spec.numerics[self.engine]
        for step in range(inputs.num_steps):
            timesteps = {
                name: self._recorder.schedule(name).timesteps[step].to(x.device).expand(len(x))
                for name, x in latents.items()
            }
            velocity = self.family.velocity(
                self._network(pipeline, timesteps),
                latents,
                timesteps,
                inputs.conditions,
                inputs.negative,
                inputs.guidance,
                numerics,
            )
            latents = {name: self._recorder.advance(name, v) for name, v in velocity.items()}

    def _network(self, pipeline: Any, timesteps: Streams) -> nn.Module:
        """The one whose turn it is, at a step of the whole batch."""
        experts = self.family.spec.experts
        turn = 0 if len(experts) == 1 else int(self.family.experts_at(timesteps)[0])
        return getattr(pipeline, experts[turn])


class DiffusersDriver(PipelineDriver):
    """For diffusers' stock pipeline."""

    engine = "diffusers"

    def load(self, dtype: torch.dtype) -> Any:
        """The pipeline, on the CPU."""
        return self.family.load_pipeline(dtype)


class VllmOmniDriver(PipelineDriver):
    """For vLLM-Omni's stock pipeline. It may import vllm_omni inside of its methods: the engine has prepared
    that.
    """

    engine = "vllm_omni"

    def engine_options(self) -> dict[str, Any]:
        """Arguments of OmniDiffusionConfig beyond those that settings decide."""
        return {}
