"""Which denoising steps of a sample are stochastic."""

from __future__ import annotations

from dataclasses import dataclass

from omnirl_hpc.config.schema import SamplingConfig
from omnirl_hpc.sampling.noise import WINDOW, uniform_integer


@dataclass(frozen=True)
class Window:
    """The denoising steps start, start + 1, …, start + size - 1."""

    start: int
    size: int


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
    return Window(uniform_integer(window.first, _last(sampling) - size + 1, seed, WINDOW, *identity), size)
