"""What a model family provides. A sample's latents are named streams, fp32 between denoising steps;
everything else that the model reads is a condition, whose tensors are the family's own business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from omnirl_hpc.config.schema import ModelConfig, SamplingConfig
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.errors import ConfigError, DataError
from omnirl_hpc.models.spec import FamilySpec
from omnirl_hpc.sampling.samples import Condition, Media
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import Streams


@dataclass(frozen=True)
class Guidance:
    """The scales of classifier-free guidance, by names that the family knows."""

    scales: dict[str, float]


@dataclass(frozen=True)
class Numerics:
    """How the engine computes a velocity, where the family leaves a choice: the actor does the same."""

    batched_cfg: bool = False  # both branches of guidance as one batch, not one after the other


class ModelFamily(ABC):
    """One family, bound to a checkpoint and a size of images or videos."""

    spec: FamilySpec  # which checkpoints it can train; a family of ours has it in spec.py beside it
    lora_targets: tuple[str, ...]  # PEFT target_modules of the published recipes
    max_text_tokens: int  # longer prompts are an error

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @abstractmethod
    def load_pipeline(self, dtype: torch.dtype) -> Any:
        """diffusers' stock pipeline, on the CPU."""

    def load_encoders(self, dtype: torch.dtype) -> Any:
        """The same pipeline without its transformer, for `encode` and `encode_media`. A family that can
        should not load the transformer first.
        """
        pipeline = self.load_pipeline(dtype)
        pipeline.transformer = None
        return pipeline

    @abstractmethod
    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        """The denoising network alone, on the CPU."""

    @abstractmethod
    def empty_transformer(self, dtype: torch.dtype) -> nn.Module:
        """The same with its parameters on the meta device, and all that is no parameter as it is to be.

        The actor reads the parameters from the folder `transformer` of the checkpoint, each rank its part.
        """

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
        """Tokens of a prompt, from the tokenizer alone. Raises DataError above `max_text_tokens`."""

    def longest_text(self, widths: Sequence[int]) -> int:
        """The most tokens that a prompt may have where conditions are padded to one of `widths`
        (data.text_lengths).
        """
        return widths[-1] - 1

    def condition_width(self, texts: Sequence[str], widths: Sequence[int]) -> int:
        """The width that the conditions of these texts are padded to. Raises DataError where none holds them.

        Here: the smallest of `widths` that is greater than every number of tokens. Greater, not equal: at
        least one token of padding keeps an attention mask in every batch. Pipelines drop a mask of all ones
        and then take another kernel, which would make a sample's value depend on its neighbours.
        """
        longest = max(self.count_text_tokens(text) for text in texts)
        for width in widths:
            if width > longest:
                return width
        raise DataError(
            f"no width in data.text_lengths={list(widths)} holds {longest} tokens and one of padding"
        )

    @abstractmethod
    def encode(self, pipeline: Any, prompt: Prompt) -> Condition:
        """The condition of one prompt, unpadded, in the encoders' dtype and on their device."""

    @abstractmethod
    def pad(self, condition: Condition, width: int) -> Condition:
        """A condition at `width`, with what tells padding from content. Raises ValueError where it does not
        fit: no truncation.
        """

    def guidance(self, sampling: SamplingConfig) -> Guidance:
        """The scales that the settings ask for."""
        return Guidance({"text": sampling.true_cfg_scale})

    @abstractmethod
    def pipeline_inputs(
        self, conditions: dict[str, Tensor], negative: dict[str, Tensor] | None, guidance: Guidance
    ) -> dict[str, Any]:
        """Keyword arguments of the stock pipeline for ready-made conditions."""

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
