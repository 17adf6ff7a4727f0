"""How Qwen-Image's pipelines are driven."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.models.family import DenoisingInputs, DiffusersDriver, PipelineDriver, VllmOmniDriver
from omnirl_hpc.sampling.recorder import Recorder
from omnirl_hpc.sampling.samples import Condition
from omnirl_hpc.sampling.streams import LATENTS


class _QwenImageDriver(PipelineDriver):
    """What both engines have in common."""

    def encode(self, pipeline: Any, prompt: Prompt) -> Condition:
        # One prompt at a time: the value must not depend on what else is in the batch, and both upstream
        # pipelines order masks differently from embeddings when they repeat several prompts.
        embeds, mask = pipeline.encode_prompt(
            prompt.prompt,
            num_images_per_prompt=1,
            max_sequence_length=self.family.spec.max_text_tokens,
        )
        if mask is not None and not mask.all():
            raise RuntimeError("the text encoder padded a single prompt")
        return {"embeds": embeds[0]}

    def embeddings(self, inputs: DenoisingInputs) -> dict[str, Tensor]:
        """As both pipelines take them, [B, …]."""
        text, negative = inputs.conditions, inputs.negative
        embeddings = {"prompt_embeds": text["embeds"], "prompt_embeds_mask": text["mask"].long()}
        if negative is not None:
            embeddings |= {
                "negative_prompt_embeds": negative["embeds"],
                "negative_prompt_embeds_mask": negative["mask"].long(),
            }
        return embeddings

    def settings(self, inputs: DenoisingInputs) -> dict[str, Any]:
        """The same for all samples."""
        return {
            "true_cfg_scale": inputs.guidance.scales["text"],
            "height": self.family.config.height,
            "width": self.family.config.width,
            "max_sequence_length": self.family.spec.max_text_tokens,
            "num_inference_steps": inputs.num_steps,
            "output_type": "latent",
        }


class QwenImageDiffusers(_QwenImageDriver, DiffusersDriver):
    """See PipelineDriver."""

    def denoise(self, pipeline: Any, inputs: DenoisingInputs) -> None:
        pipeline(**self.embeddings(inputs), **self.settings(inputs), latents=inputs.initial[LATENTS])


class QwenImageVllmOmni(_QwenImageDriver, VllmOmniDriver):
    """See PipelineDriver. One engine request for each sample; the pipeline runs them as one batch.

    Embeddings come padded to one width, with masks, so that prompts of different lengths share a batch.
    """

    def attach(self, pipeline: Any, recorder: Recorder) -> None:
        super().attach(pipeline, recorder)
        pipeline.set_progress_bar_config(disable=True)

    def denoise(self, pipeline: Any, inputs: DenoisingInputs) -> None:
        from vllm_omni.diffusion.request import OmniDiffusionRequest
        from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        embeddings, settings = self.embeddings(inputs), self.settings(inputs)
        latents = inputs.initial[LATENTS]
        requests = [
            OmniDiffusionRequest(
                prompt={"prompt": ""} | {name: value[i] for name, value in embeddings.items()},
                sampling_params=OmniDiffusionSamplingParams(**settings, latents=latents[i : i + 1]),
                request_id=str(i),
            )
            for i in range(len(latents))
        ]
        pipeline.forward(DiffusionRequestBatch(requests))
