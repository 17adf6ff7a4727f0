"""Qwen-Image (arXiv 2508.02324): text-to-image, a two-stream MMDiT with a Qwen2.5-VL text encoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoTokenizer

from omnirl_hpc.errors import DataError
from omnirl_hpc.models.family import ModelFamily
from omnirl_hpc.models.qwen_image.spec import SPEC
from omnirl_hpc.planning.qwen_image import LORA_TARGETS
from omnirl_hpc.sampling.schedule import Schedule, make_schedule
from omnirl_hpc.sampling.trajectories import TextEmbeds

# from_pretrained's argument was renamed: 0.38 knows only the old name, 0.40 warns of it
DTYPE = "dtype" if Version(diffusers.__version__) >= Version("0.40") else "torch_dtype"
VAE_SCALE = 8  # pixels per latent cell
PATCH = 2  # latent cells per token, each way


class QwenImage(ModelFamily):
    """See ModelFamily. Guidance is Qwen's true CFG: the combination is rescaled to the norm of the
    conditional branch.
    """

    spec = SPEC
    lora_targets = LORA_TARGETS
    max_text_tokens = 1024

    def load_pipeline(self, dtype: torch.dtype) -> QwenImagePipeline:
        pipeline = QwenImagePipeline.from_pretrained(
            self.config.path, **{DTYPE: dtype}, local_files_only=True
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        return QwenImageTransformer2DModel.from_pretrained(
            self.config.path, subfolder="transformer", **{DTYPE: dtype}, local_files_only=True
        )

    def empty_transformer(self, dtype: torch.dtype) -> nn.Module:
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # as from_pretrained does
        try:
            with init_empty_weights(include_buffers=False):
                return QwenImageTransformer2DModel.from_config(self._transformer_config).eval()
        finally:
            torch.set_default_dtype(usual)

    def make_schedule(self, num_steps: int) -> Schedule:
        return make_schedule(
            self._read_json("scheduler/scheduler_config.json"), num_steps, self.latent_shape()[0]
        )

    def latent_shape(self) -> tuple[int, int]:
        cell = VAE_SCALE * PATCH
        return (self.config.height // cell) * (self.config.width // cell), self._transformer_config[
            "in_channels"
        ]

    def count_text_tokens(self, prompt: str) -> int:
        tokens = len(self._tokenizer(PROMPT_TEMPLATE.format(prompt)).input_ids) - TEMPLATE_START
        if tokens > self.max_text_tokens:
            raise DataError(
                f"a prompt of {tokens} tokens is longer than Qwen-Image's {self.max_text_tokens}: "
                f"{prompt[:60]!r}…"
            )
        return tokens

    def encode_prompt(self, pipeline: Any, prompt: str) -> Tensor:
        # One prompt at a time: the value must not depend on what else is in the batch, and both upstream
        # pipelines order masks differently from embeddings when they repeat several prompts.
        embeds, mask = pipeline.encode_prompt(
            prompt, num_images_per_prompt=1, max_sequence_length=self.max_text_tokens
        )
        if mask is not None and not mask.all():
            raise RuntimeError("the text encoder padded a single prompt")
        return embeds[0]

    def pipeline_inputs(self, text: TextEmbeds, negative: TextEmbeds | None, scale: float) -> dict[str, Any]:
        inputs = {
            "prompt_embeds": text.embeds,
            "prompt_embeds_mask": text.mask.long(),
            "true_cfg_scale": scale,
            "height": self.config.height,
            "width": self.config.width,
            "max_sequence_length": self.max_text_tokens,
        }
        if negative is not None:
            inputs |= {
                "negative_prompt_embeds": negative.embeds,
                "negative_prompt_embeds_mask": negative.mask.long(),
            }
        return inputs

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
        def predict(latents: Tensor, timesteps: Tensor, text: TextEmbeds) -> Tensor:
            dtype = text.embeds.dtype
            grid = (1, self.config.height // VAE_SCALE // PATCH, self.config.width // VAE_SCALE // PATCH)
            return transformer(
                hidden_states=latents.to(dtype),
                timestep=timesteps.to(dtype) / 1000,  # rounded before the division, as in the pipeline
                encoder_hidden_states=text.embeds,
                encoder_hidden_states_mask=text.mask,
                img_shapes=[[grid]] * len(latents),
                return_dict=False,
            )[0]

        if negative is None:
            return predict(latents, timesteps, text)
        if batched:
            both = torch.cat([text, negative])
            positive, unconditional = predict(latents.repeat(2, 1, 1), timesteps.repeat(2), both).chunk(2)
        else:
            positive, unconditional = predict(latents, timesteps, text), predict(latents, timesteps, negative)
        combined = unconditional + scale * (positive - unconditional)
        return combined * (
            torch.norm(positive, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True)
        )

    @torch.no_grad()
    def decode(self, vae: nn.Module, latents: Tensor) -> Tensor:
        latents = QwenImagePipeline._unpack_latents(
            latents, self.config.height, self.config.width, VAE_SCALE
        ).to(vae.dtype)
        statistics = {"dtype": latents.dtype, "device": latents.device}
        mean = torch.tensor(vae.config.latents_mean, **statistics).view(1, -1, 1, 1, 1)
        std = 1.0 / torch.tensor(vae.config.latents_std, **statistics).view(1, -1, 1, 1, 1)
        images = vae.decode(latents / std + mean, return_dict=False)[0][:, :, 0]
        return (images.float() / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)

    @cached_property
    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(Path(self.config.path) / "tokenizer", local_files_only=True)

    @cached_property
    def _transformer_config(self) -> dict[str, Any]:
        return self._read_json("transformer/config.json")

    def _read_json(self, name: str) -> dict[str, Any]:
        return json.loads((Path(self.config.path) / name).read_text())


# The pipeline wraps a prompt in this and drops the first TEMPLATE_START tokens (attributes of
# QwenImagePipeline, which are set in its constructor; a test holds them equal).
PROMPT_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
TEMPLATE_START = 34
