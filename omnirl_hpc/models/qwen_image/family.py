"""Qwen-Image (arXiv 2508.02324): text-to-image, a two-stream MMDiT with a Qwen2.5-VL text encoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from torch import Tensor

from omnirl_hpc.models.family import ModelFamily, PipelineDriver, as_pixels
from omnirl_hpc.models.qwen_image.drivers import QwenImageDiffusers, QwenImageVllmOmni
from omnirl_hpc.models.qwen_image.spec import SPEC
from omnirl_hpc.models.spec import Guidance, Numerics
from omnirl_hpc.sampling.samples import Condition, Media
from omnirl_hpc.sampling.schedule import Schedule, make_schedule
from omnirl_hpc.sampling.streams import LATENTS, Streams

VAE_SCALE = 8  # pixels per latent cell
PATCH = 2  # latent cells per token, each way


class QwenImage(ModelFamily):
    """See ModelFamily. Guidance is Qwen's true CFG: the combination is rescaled to the norm of the
    conditional branch.
    """

    spec = SPEC
    conditional_first = True  # no pipeline of Qwen-Image batches the branches

    def driver(self, engine: str) -> PipelineDriver:
        return {"diffusers": QwenImageDiffusers, "vllm_omni": QwenImageVllmOmni}[engine](self)

    def schedules(self, num_steps: int) -> dict[str, Schedule]:
        tokens, _ = self.stream_shapes()[LATENTS]
        return {LATENTS: make_schedule(self.component_config("scheduler"), num_steps, tokens)}

    def stream_shapes(self) -> dict[str, tuple[int, ...]]:
        cell = VAE_SCALE * PATCH
        tokens = (self.config.height // cell) * (self.config.width // cell)
        return {LATENTS: (tokens, self._transformer_config["in_channels"])}

    def tokenized_length(self, text: str) -> int:
        return super().tokenized_length(PROMPT_TEMPLATE.format(text)) - TEMPLATE_START

    def pad(self, condition: Condition, width: int) -> Condition:
        embeds = condition["embeds"]
        tokens, channels = embeds.shape
        if tokens > width:
            raise ValueError(f"{tokens} tokens do not fit into {width}")
        padded = embeds.new_zeros((width, channels))
        padded[:tokens] = embeds
        return {"embeds": padded, "mask": torch.arange(width, device=embeds.device) < tokens}

    def predict(
        self,
        transformer: Callable[..., Any],
        latents: Streams,
        timesteps: Streams,
        conditions: dict[str, Tensor],
        numerics: Numerics,
    ) -> Streams:
        x, dtype = latents[LATENTS], conditions["embeds"].dtype
        grid = (1, self.config.height // VAE_SCALE // PATCH, self.config.width // VAE_SCALE // PATCH)
        velocity = transformer(
            hidden_states=x.to(dtype),
            timestep=timesteps[LATENTS].to(dtype) / 1000,  # rounded before the division, as in the pipeline
            encoder_hidden_states=conditions["embeds"],
            encoder_hidden_states_mask=conditions["mask"],
            img_shapes=[[grid]] * len(x),
            return_dict=False,
        )[0]
        return {LATENTS: velocity}

    def guide(self, positive: Streams, unconditional: Streams, guidance: Guidance) -> Streams:
        conditional, combined = positive[LATENTS], super().guide(positive, unconditional, guidance)[LATENTS]
        return {
            LATENTS: combined
            * (torch.norm(conditional, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True))
        }

    @torch.no_grad()
    def encode_media(self, pipeline: Any, media: Media) -> Streams:
        vae = pipeline.vae
        images = (media.frames.transpose(1, 2).to(vae.dtype) / 127.5 - 1).contiguous()  # [B, 3, 1, H, W]
        mean, std = _latent_statistics(vae, images)
        cells = (vae.encode(images).latent_dist.mode() - mean) * std  # no draw: the same at every epoch
        batch, channels, _, height, width = cells.shape
        return {LATENTS: QwenImagePipeline._pack_latents(cells, batch, channels, height, width).float()}

    @torch.no_grad()
    def decode(self, pipeline: Any, latents: Streams) -> Media:
        vae = pipeline.vae
        cells = QwenImagePipeline._unpack_latents(
            latents[LATENTS], self.config.height, self.config.width, VAE_SCALE
        ).to(vae.dtype)
        mean, std = _latent_statistics(vae, cells)
        images = vae.decode(cells / std + mean, return_dict=False)[0]  # [B, 3, 1, H, W]
        return Media(frames=as_pixels(images).transpose(1, 2))

    @cached_property
    def _transformer_config(self) -> dict[str, Any]:
        return self.component_config("transformer")


def _latent_statistics(vae: AutoencoderKLQwenImage, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation of the VAE's latents, by channel."""
    place: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    mean = torch.tensor(vae.config.latents_mean, **place).view(1, -1, 1, 1, 1)
    return mean, 1.0 / torch.tensor(vae.config.latents_std, **place).view(1, -1, 1, 1, 1)


# The pipeline wraps a prompt in this and drops the first TEMPLATE_START tokens (attributes of
# QwenImagePipeline, which are set in its constructor; a test holds them equal).
PROMPT_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
TEMPLATE_START = 34
