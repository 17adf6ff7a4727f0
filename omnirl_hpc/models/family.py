"""What a model family provides. Latents are always [B, S, C]: S tokens of C channels, fp32 between denoising
steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from omnirl_hpc.config.schema import ModelConfig
from omnirl_hpc.models.spec import FamilySpec
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.trajectories import TextEmbeds


class ModelFamily(ABC):
    """One family, bound to a checkpoint and an image size."""

    spec: FamilySpec  # which checkpoints it can train; a family of ours has it in spec.py beside it
    lora_targets: tuple[str, ...]  # PEFT target_modules of the published recipes
    max_text_tokens: int  # longer prompts are an error

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @abstractmethod
    def load_pipeline(self, dtype: torch.dtype) -> Any:
        """diffusers' stock pipeline, on the CPU."""

    @abstractmethod
    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        """The denoising network alone, on the CPU."""

    @abstractmethod
    def empty_transformer(self, dtype: torch.dtype) -> nn.Module:
        """The same with its parameters on the meta device, and all that is no parameter as it is to be.

        The actor reads the parameters from the folder `transformer` of the checkpoint, each rank its part.
        """

    @abstractmethod
    def make_schedule(self, num_steps: int) -> Schedule:
        """The schedule of the pipeline for this image size, from the checkpoint's scheduler file."""

    @abstractmethod
    def latent_shape(self) -> tuple[int, int]:
        """(S, C) for this image size."""

    @abstractmethod
    def count_text_tokens(self, prompt: str) -> int:
        """Length of the prompt's embeddings, from the tokenizer alone. Raises DataError above
        `max_text_tokens`.
        """

    @abstractmethod
    def encode_prompt(self, pipeline: Any, prompt: str) -> Tensor:
        """Embeddings [L, D] of one prompt, unpadded, in the text encoder's dtype and on its device."""

    @abstractmethod
    def pipeline_inputs(self, text: TextEmbeds, negative: TextEmbeds | None, scale: float) -> dict[str, Any]:
        """Keyword arguments of the stock pipeline for ready-made embeddings and a guidance scale."""

    @abstractmethod
    def velocity(
        self,
        transformer: Callable[..., Any],
        latents: Tensor,
        timesteps: Tensor,
        text: TextEmbeds,
        negative: TextEmbeds | None,
        scale: float,
        batched: bool,
    ) -> Tensor:
        """The guided velocity [B, S, C], computed as the family's pipeline computes it, with gradients.

        latents [B, S, C] fp32, timesteps [B] fp32 as in Schedule; batched: both branches of guidance as one
        batch.
        """

    @abstractmethod
    def decode(self, vae: nn.Module, latents: Tensor) -> Tensor:
        """Clean latents [B, S, C] -> images [B, 3, H, W] uint8."""
