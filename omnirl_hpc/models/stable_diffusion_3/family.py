"""Stable Diffusion 3.5 (arXiv 2403.03206): text-to-image, an MMDiT with two CLIP text models and T5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from omnirl_hpc.models.family import ModelFamily, PipelineDriver, as_pixels
from omnirl_hpc.models.spec import Numerics
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

    def pad(self, condition: Condition, width: int) -> Condition:
        """It has its width already."""
        return condition

    def predict(
        self,
        transformer: Callable[..., Any],
        latents: Streams,
        timesteps: Streams,
        conditions: dict[str, Tensor],
        numerics: Numerics,
    ) -> Streams:
        t, dtype = timesteps[LATENTS], conditions["embeds"].dtype
        velocity = transformer(
            hidden_states=latents[LATENTS].to(dtype),
            timestep=t.to(dtype) if numerics.round_timestep else t,
            encoder_hidden_states=conditions["embeds"],
            pooled_projections=conditions["pooled"],
            return_dict=False,
        )[0]
        return {LATENTS: velocity}

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
        return Media(frames=as_pixels(images)[:, None])
