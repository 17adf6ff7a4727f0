"""Stable Diffusion 3.5 (arXiv 2403.03206): text-to-image, an MMDiT with two CLIP text models and T5."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor
from transformers import AutoTokenizer

from omnirl_hpc.errors import DataError
from omnirl_hpc.models.family import ModelFamily, PipelineDriver
from omnirl_hpc.models.spec import Guidance, Numerics
from omnirl_hpc.models.stable_diffusion_3.drivers import StableDiffusion3Diffusers, StableDiffusion3VllmOmni
from omnirl_hpc.models.stable_diffusion_3.shape import PIXELS_PER_CELL
from omnirl_hpc.models.stable_diffusion_3.spec import SPEC
from omnirl_hpc.sampling.samples import Condition, Media
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import LATENTS, Streams


class StableDiffusion3(ModelFamily):
    """See ModelFamily. A condition is `embeds` [333, D], 77 tokens of CLIP and 256 of T5 without a mask, and
    `pooled` [D'] of CLIP. Of a long prompt CLIP reads the first 77 tokens, as it was trained; T5 must take
    all of it.
    """

    spec = SPEC

    def driver(self, engine: str) -> PipelineDriver:
        return {"diffusers": StableDiffusion3Diffusers, "vllm_omni": StableDiffusion3VllmOmni}[engine](self)

    def schedules(self, num_steps: int) -> dict[str, Schedule]:
        """The scheduler's own: evenly spaced between the shifted ends of its training schedule, and shifted
        again.
        """
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self.component_config("scheduler"))
        scheduler.set_timesteps(num_steps)
        return {LATENTS: Schedule(scheduler.sigmas, scheduler.timesteps)}

    def stream_shapes(self) -> dict[str, tuple[int, ...]]:
        """Channels, height, width."""
        cells = self.config.height // PIXELS_PER_CELL, self.config.width // PIXELS_PER_CELL
        return {LATENTS: (self.component_config("transformer")["in_channels"], *cells)}

    def count_text_tokens(self, text: str) -> int:
        """Of T5."""
        tokens, most = len(self._tokenizer(text).input_ids), self.spec.max_text_tokens
        if tokens > most:
            raise DataError(
                f"a prompt of {tokens} tokens is longer than Stable Diffusion 3.5's {most}: {text[:60]!r}…"
            )
        return tokens

    def pad(self, condition: Condition, width: int) -> Condition:
        """It has its width already."""
        return condition

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
        def predict(x: Tensor, t: Tensor, text: dict[str, Tensor]) -> Tensor:
            dtype = text["embeds"].dtype
            return transformer(
                hidden_states=x.to(dtype),
                timestep=t.to(dtype) if numerics.round_timestep else t,
                encoder_hidden_states=text["embeds"],
                pooled_projections=text["pooled"],
                return_dict=False,
            )[0]

        x, t = latents[LATENTS], timesteps[LATENTS]
        if negative is None:
            return {LATENTS: predict(x, t, conditions)}
        if numerics.batched_cfg:
            both = {name: torch.cat([negative[name], conditions[name]]) for name in conditions}
            unconditional, positive = predict(torch.cat([x, x]), torch.cat([t, t]), both).chunk(2)
        else:
            positive, unconditional = predict(x, t, conditions), predict(x, t, negative)
        return {LATENTS: unconditional + guidance.scales["text"] * (positive - unconditional)}

    @torch.no_grad()
    def encode_media(self, pipeline: Any, media: Media) -> Streams:
        vae = pipeline.vae
        images = media.frames[:, 0].to(vae.dtype) / 127.5 - 1  # [B, 3, H, W]
        cells = vae.encode(images).latent_dist.mode()  # no draw: the same at every epoch
        return {LATENTS: ((cells - vae.config.shift_factor) * vae.config.scaling_factor).float()}

    @torch.no_grad()
    def decode(self, pipeline: Any, latents: Streams) -> Media:
        vae = pipeline.vae
        cells = latents[LATENTS].to(vae.dtype)
        cells = cells / vae.config.scaling_factor + vae.config.shift_factor
        images = vae.decode(cells, return_dict=False)[0]  # [B, 3, H, W]
        frames = (images.float() / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
        return Media(frames=frames[:, None])

    @cached_property
    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(Path(self.config.path) / "tokenizer_3", local_files_only=True)
