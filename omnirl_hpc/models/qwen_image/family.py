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

from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.errors import DataError
from omnirl_hpc.models.family import Guidance, ModelFamily, Numerics
from omnirl_hpc.models.qwen_image.spec import SPEC
from omnirl_hpc.planning.qwen_image import LORA_TARGETS
from omnirl_hpc.sampling.samples import Condition, Media
from omnirl_hpc.sampling.schedule import Schedule, make_schedule
from omnirl_hpc.sampling.streams import LATENTS, Streams

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
        return self._load(dtype)

    def load_encoders(self, dtype: torch.dtype) -> QwenImagePipeline:
        return self._load(dtype, transformer=None)

    def _load(self, dtype: torch.dtype, **components: None) -> QwenImagePipeline:
        pipeline = QwenImagePipeline.from_pretrained(
            self.config.path, **{DTYPE: dtype}, **components, local_files_only=True
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

    def schedules(self, num_steps: int) -> dict[str, Schedule]:
        tokens, _ = self.stream_shapes()[LATENTS]
        return {LATENTS: make_schedule(self._read_json("scheduler/scheduler_config.json"), num_steps, tokens)}

    def stream_shapes(self) -> dict[str, tuple[int, ...]]:
        cell = VAE_SCALE * PATCH
        tokens = (self.config.height // cell) * (self.config.width // cell)
        return {LATENTS: (tokens, self._transformer_config["in_channels"])}

    def count_text_tokens(self, text: str) -> int:
        tokens = len(self._tokenizer(PROMPT_TEMPLATE.format(text)).input_ids) - TEMPLATE_START
        if tokens > self.max_text_tokens:
            raise DataError(
                f"a prompt of {tokens} tokens is longer than Qwen-Image's {self.max_text_tokens}: "
                f"{text[:60]!r}…"
            )
        return tokens

    def encode(self, pipeline: Any, prompt: Prompt) -> Condition:
        # One prompt at a time: the value must not depend on what else is in the batch, and both upstream
        # pipelines order masks differently from embeddings when they repeat several prompts.
        embeds, mask = pipeline.encode_prompt(
            prompt.prompt, num_images_per_prompt=1, max_sequence_length=self.max_text_tokens
        )
        if mask is not None and not mask.all():
            raise RuntimeError("the text encoder padded a single prompt")
        return {"embeds": embeds[0]}

    def pad(self, condition: Condition, width: int) -> Condition:
        embeds = condition["embeds"]
        tokens, channels = embeds.shape
        if tokens > width:
            raise ValueError(f"{tokens} tokens do not fit into {width}")
        padded = embeds.new_zeros((width, channels))
        padded[:tokens] = embeds
        return {"embeds": padded, "mask": torch.arange(width, device=embeds.device) < tokens}

    def pipeline_inputs(
        self, conditions: dict[str, Tensor], negative: dict[str, Tensor] | None, guidance: Guidance
    ) -> dict[str, Any]:
        inputs = {
            "prompt_embeds": conditions["embeds"],
            "prompt_embeds_mask": conditions["mask"].long(),
            "true_cfg_scale": guidance.scales["text"],
            "height": self.config.height,
            "width": self.config.width,
            "max_sequence_length": self.max_text_tokens,
        }
        if negative is not None:
            inputs |= {
                "negative_prompt_embeds": negative["embeds"],
                "negative_prompt_embeds_mask": negative["mask"].long(),
            }
        return inputs

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
        x, t = latents[LATENTS], timesteps[LATENTS]

        def predict(x: Tensor, t: Tensor, text: dict[str, Tensor]) -> Tensor:
            dtype = text["embeds"].dtype
            grid = (1, self.config.height // VAE_SCALE // PATCH, self.config.width // VAE_SCALE // PATCH)
            return transformer(
                hidden_states=x.to(dtype),
                timestep=t.to(dtype) / 1000,  # rounded before the division, as in the pipeline
                encoder_hidden_states=text["embeds"],
                encoder_hidden_states_mask=text["mask"],
                img_shapes=[[grid]] * len(x),
                return_dict=False,
            )[0]

        if negative is None:
            return {LATENTS: predict(x, t, conditions)}
        if numerics.batched_cfg:
            both = {name: torch.cat([conditions[name], negative[name]]) for name in conditions}
            positive, unconditional = predict(x.repeat(2, 1, 1), t.repeat(2), both).chunk(2)
        else:
            positive, unconditional = predict(x, t, conditions), predict(x, t, negative)
        combined = unconditional + guidance.scales["text"] * (positive - unconditional)
        return {
            LATENTS: combined
            * (torch.norm(positive, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True))
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
        frames = (images.float() / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
        return Media(frames=frames.transpose(1, 2))

    @cached_property
    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(Path(self.config.path) / "tokenizer", local_files_only=True)

    @cached_property
    def _transformer_config(self) -> dict[str, Any]:
        return self._read_json("transformer/config.json")

    def _read_json(self, name: str) -> dict[str, Any]:
        return json.loads((Path(self.config.path) / name).read_text())


def _latent_statistics(vae: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation of the VAE's latents, by channel."""
    place = {"dtype": like.dtype, "device": like.device}
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
