"""The rules about how samples are drawn: guidance, noise, the window."""

from __future__ import annotations

from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import require


def guidance_is_valid(config: Config, world_size: int) -> None:
    scale = config.sampling.true_cfg_scale
    require(scale >= 1, f"sampling.true_cfg_scale={scale} must be 1 (no guidance) or more")


def noise_level_fits_transition(config: Config, world_size: int) -> None:
    eta, kind = config.sampling.noise_level, config.sampling.transition
    require(
        eta > 0,
        f"sampling.noise_level={eta} must be greater than 0: without noise there is no log-probability to "
        "train",
    )
    require(
        kind != "cps" or eta <= 1,
        f"sampling.noise_level={eta} is too large for sampling.transition=cps, whose standard deviation is "
        "sigma' sin(eta pi/2): use 1 or less",
    )


def window_fits_schedule(config: Config, world_size: int) -> None:
    steps, window = config.sampling.num_inference_steps, config.sampling.window
    require(
        steps >= 2,
        f"sampling.num_inference_steps={steps}: at least 2 are needed, since the last step adds no noise",
    )
    last = steps - 1 if window.last is None else window.last
    require(
        0 <= window.first < last <= steps - 1,
        f"sampling.window.first={window.first}, sampling.window.last={window.last} must satisfy 0 <= first < "
        f"last <= sampling.num_inference_steps - 1 = {steps - 1} (the last step adds no noise)",
    )
    size = last - window.first if window.size is None else window.size
    require(
        1 <= size <= last - window.first,
        f"sampling.window.size={window.size} does not fit between sampling.window.first={window.first} and "
        f"sampling.window.last={last}: use 1 to {last - window.first}",
    )


def window_can_be_followed_by_fewer_steps(config: Config, world_size: int) -> None:
    window = config.sampling.window
    require(
        0 < window.compress <= 1,
        f"sampling.window.compress={window.compress} must be above 0 and at most 1",
    )
    require(
        window.compress == 1 or window.per == "step",
        f"sampling.window.compress={window.compress} and sampling.window.per={window.per}: samples whose "
        "windows end at different steps would have different numbers of steps; set sampling.window.per=step",
    )
