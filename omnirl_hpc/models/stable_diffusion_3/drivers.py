"""How Stable Diffusion 3.5's pipelines are driven."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.models.family import DenoisingInputs, DiffusersDriver, VllmOmniDriver
from omnirl_hpc.sampling.samples import Condition
from omnirl_hpc.sampling.streams import LATENTS


class StableDiffusion3Diffusers(DiffusersDriver):
    """See PipelineDriver."""

    def encode(self, pipeline: Any, prompt: Prompt) -> Condition:
        embeds, _, pooled, _ = pipeline.encode_prompt(
            prompt=prompt.prompt,
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=self.family.spec.max_text_tokens,
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}

    def denoise(self, pipeline: Any, inputs: DenoisingInputs) -> None:
        pipeline(
            **_embeddings(inputs),
            guidance_scale=inputs.guidance.scales["text"],
            height=self.family.config.height,
            width=self.family.config.width,
            latents=inputs.initial[LATENTS],
            num_inference_steps=inputs.num_steps,
            output_type="latent",
        )


class StableDiffusion3VllmOmni(VllmOmniDriver):
    """See PipelineDriver. The pipeline's denoising loop is called directly: its `forward` would encode
    again.
    """

    def encode(self, pipeline: Any, prompt: Prompt) -> Condition:
        embeds, pooled = pipeline.encode_prompt(
            prompt.prompt, None, None, max_sequence_length=self.family.spec.max_text_tokens
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}

    def denoise(self, pipeline: Any, inputs: DenoisingInputs) -> None:
        latents = inputs.initial[LATENTS].to(inputs.conditions["embeds"].dtype)
        pipeline._interrupt = False
        pipeline.scheduler.set_timesteps(inputs.num_steps, device=latents.device)
        pipeline.diffuse(
            latents=latents,
            timesteps=pipeline.scheduler.timesteps,
            **_embeddings(inputs),
            do_true_cfg=inputs.negative is not None,
            guidance_scale=inputs.guidance.scales["text"],
        )


def _embeddings(inputs: DenoisingInputs) -> dict[str, Tensor | None]:
    """As both pipelines take them, [B, …]."""
    text, negative = inputs.conditions, inputs.negative
    return {
        "prompt_embeds": text["embeds"],
        "pooled_prompt_embeds": text["pooled"],
        "negative_prompt_embeds": None if negative is None else negative["embeds"],
        "negative_pooled_prompt_embeds": None if negative is None else negative["pooled"],
    }
