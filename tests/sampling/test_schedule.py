"""The schedule against plain diffusers, called the way its QwenImagePipeline calls it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps

from omnirl_hpc.models.qwen_image.tiny import SCHEDULER
from omnirl_hpc.sampling.schedule import dynamic_shift, make_schedule

SIZES = [(512, 512), (768, 512), (1024, 1024), (1328, 1328)]


def tokens(height: int, width: int) -> int:
    return (height // 16) * (width // 16)  # the VAE divides by 8, packing by 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_steps", [4, 10, 28, 50])
def test_equals_diffusers_qwen_image_pipeline(num_steps, size):
    # The lines of QwenImagePipeline.__call__ between "Prepare timesteps" and the denoising loop.
    plain = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
    mu = calculate_shift(
        tokens(*size),
        plain.config.get("base_image_seq_len", 256),
        plain.config.get("max_image_seq_len", 4096),
        plain.config.get("base_shift", 0.5),
        plain.config.get("max_shift", 1.15),
    )
    timesteps, _ = retrieve_timesteps(
        plain, num_steps, "cpu", sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=mu
    )

    schedule = make_schedule(SCHEDULER, num_steps, tokens(*size))
    assert torch.equal(schedule.sigmas, plain.sigmas)
    assert torch.equal(schedule.timesteps, timesteps)
    assert schedule.num_steps == num_steps
    assert schedule.sigma_max == float(plain.sigmas[1])


def test_schedule_descends_from_one_to_zero():
    sigmas = make_schedule(SCHEDULER, 50, tokens(512, 512)).sigmas
    assert sigmas.dtype == torch.float32 and sigmas[0] == 1 and sigmas[-1] == 0
    assert bool((sigmas.diff() < 0).all())
    assert float(sigmas[-2]) == pytest.approx(
        SCHEDULER["shift_terminal"], abs=1e-6
    )  # diffusers' stretch_shift_to_terminal


def test_mu_at_1024_tokens():
    # verl_omni.md, row 37: Qwen-Image's own file, 0.5 + (1024 - 256) 0.4 / 7936,
    # and diffusers' fallback, 0.5 + (1024 - 256) 0.65 / 3840
    assert dynamic_shift(1024, SCHEDULER) == pytest.approx(0.5387, abs=5e-5)
    assert dynamic_shift(1024, {}) == pytest.approx(0.63, abs=1e-9)


def test_static_shift_needs_no_mu():
    # SD3's file: sigma' = 3 sigma / (1 + 2 sigma), so 1, 0.75, 0.5, 0.25 -> 1, 0.9, 0.75, 0.5
    schedule = make_schedule({"shift": 3.0, "use_dynamic_shifting": False}, 4, 1024)
    assert schedule.sigmas.tolist() == pytest.approx([1, 0.9, 0.75, 0.5, 0], abs=1e-6)
