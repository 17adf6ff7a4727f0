"""Which denoising steps of a sample are stochastic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from omnirl_hpc.config.schema import SamplingConfig
from omnirl_hpc.sampling.noise import WINDOW, uniform_integer
from omnirl_hpc.sampling.schedule import Schedule


@dataclass(frozen=True)
class Window:
    """The denoising steps start, start + 1, …, start + size - 1."""

    start: int
    size: int
    solver: str = "euler"  # of the ODE steps after it: euler | dpm2
    compress: float = 1.0  # their number, as a fraction of those of the schedule


NO_STEPS = Window(0, 0)  # ODE steps alone


def window_size(sampling: SamplingConfig) -> int:
    """How many steps of a sample are stochastic."""
    window = sampling.window
    return _last(sampling) - window.first if window.size is None else window.size


def trained_steps(sampling: SamplingConfig) -> range:
    """The steps that a window may hold."""
    return range(sampling.window.first, _last(sampling))


def _last(sampling: SamplingConfig) -> int:
    last = sampling.window.last
    return sampling.num_inference_steps - 1 if last is None else last


def draw_window(sampling: SamplingConfig, seed: int, step: int, prompt_id: str, sample: int) -> Window:
    """The window of one sample: uniform over the places allowed by `sampling.window`.

    `window.per` says what shares a draw: all samples of a training step, those of a prompt, or none.
    """
    window, size = sampling.window, window_size(sampling)
    identity = {"step": (step,), "prompt": (step, prompt_id), "sample": (step, prompt_id, sample)}[window.per]
    start = uniform_integer(window.first, _last(sampling) - size + 1, seed, WINDOW, *identity)
    return Window(start, size, window.solver, window.compress)


def compressed(schedules: dict[str, Schedule], window: Window) -> dict[str, Schedule]:
    """The schedules with fewer steps after the window, at even distances of the steps that there were: as
    many as `window.compress` says, rounded, and at least one.
    """
    if window.compress == 1 or not window.size:
        return schedules
    end = window.start + window.size
    return {name: _compressed(schedule, end, window.compress) for name, schedule in schedules.items()}


def _compressed(schedule: Schedule, end: int, fraction: float) -> Schedule:
    left = schedule.num_steps - end
    places = np.linspace(end, schedule.num_steps, max(1, round(left * fraction)) + 1)

    def at(values: Tensor) -> Tensor:
        """Values [N + 1] up to the window's end, and interpolated from there on."""
        after = np.interp(places, np.arange(len(values)), values.double().numpy())
        return torch.cat([values[:end], torch.from_numpy(after).to(values.dtype)])

    timesteps = torch.cat([schedule.timesteps, torch.zeros(1, dtype=schedule.timesteps.dtype)])
    return Schedule(at(schedule.sigmas), at(timesteps)[:-1])
