"""The sigma schedule: one object that the engine samples with and the actor scores with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

# What diffusers' pipelines use where a scheduler's file does not say (pipeline_qwenimage.calculate_shift).
DEFAULT_SHIFT = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}

NUM_TRAIN_TIMESTEPS = 1000  # what a sigma of 1 is as a timestep


@dataclass(frozen=True)
class Schedule:
    """N denoising steps: sigmas [N + 1], descending to 0, and the timesteps [N] the model is called with;
    fp32, CPU.
    """

    sigmas: Tensor
    timesteps: Tensor

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)

    @property
    def sigma_max(self) -> float:
        """The second sigma, which Flow-GRPO's SDE divides by where the first is 1."""
        return float(self.sigmas[1])


def dynamic_shift(num_tokens: int, scheduler_config: Mapping[str, Any]) -> float:
    """mu: linear in the number of image tokens, between the limits in the scheduler's own file."""
    limits = {key: scheduler_config.get(key, default) for key, default in DEFAULT_SHIFT.items()}
    slope = (limits["max_shift"] - limits["base_shift"]) / (
        limits["max_image_seq_len"] - limits["base_image_seq_len"]
    )
    return num_tokens * slope + limits["base_shift"] - slope * limits["base_image_seq_len"]


def make_schedule(scheduler_config: Mapping[str, Any], num_steps: int, num_tokens: int) -> Schedule:
    """The schedule that diffusers' pipeline would use for `num_steps` steps on images of `num_tokens` latent
    tokens.

    Evenly spaced sigmas 1 … 1/N, then whatever shift the scheduler's file asks for, computed by diffusers'
    scheduler.
    """
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(dict(scheduler_config))
    shift = (
        {"mu": dynamic_shift(num_tokens, scheduler_config)} if scheduler.config.use_dynamic_shifting else {}
    )
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), **shift)
    return Schedule(scheduler.sigmas, scheduler.timesteps)
