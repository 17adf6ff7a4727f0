"""MixGRPO (arXiv 2507.21802): the window of stochastic steps moves as training goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from omnirl_hpc.algorithms.flow_grpo import FlowGRPO, FlowGRPOConfig
from omnirl_hpc.config.schema import Config, WindowConfig
from omnirl_hpc.errors import one_of, require
from omnirl_hpc.sampling.noise import WINDOW, uniform_integer
from omnirl_hpc.sampling.windows import trained_steps, window_size


@dataclass
class MixGRPOConfig(FlowGRPOConfig):
    """Defaults are those of the authors' script for FLUX."""

    name: str = "mix_grpo"
    clip_range: float = 1e-4
    order: str = "progressive"  # progressive: from the first steps to the last | random: drawn at each step
    # The rest is for order=progressive.
    iterations: int = 25  # training steps at each place
    stride: int = 1  # denoising steps from one place to the next
    wrap: bool = True  # begin anew after the last place | false: stay there

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("algorithm.order", self.order, ("progressive", "random"))
        for key in ("iterations", "stride"):
            value = getattr(self, key)
            require(value > 0, f"algorithm.{key}={value} must be greater than 0")


class MixGRPO(FlowGRPO):
    """Flow-GRPO's loss; a window of sampling.window.size steps that is the same for all samples of a training
    step, between sampling.window.first and last, with ODE steps outside. After the window they may be of
    second order and fewer (MixGRPO-Flash): sampling.window.solver=dpm2, sampling.window.compress=0.4.

    (verl-omni's progressive window moves by its whole size and stays at the end: stride=SIZE, wrap=false.)
    """

    Settings = MixGRPOConfig
    settings: MixGRPOConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        per = config.sampling.window.per
        require(
            per == "step",
            f"sampling.window.per={per} is not for algorithm.name={self.settings.name}, which has one window "
            "for all samples of a training step: set it to step",
        )

    def window(self, step: int) -> WindowConfig:
        start = self._start(step)
        return replace(
            self.config.sampling.window, first=start, last=start + window_size(self.config.sampling)
        )

    def _start(self, step: int) -> int:
        steps, size = trained_steps(self.config.sampling), window_size(self.config.sampling)
        last = steps.stop - size
        if self.settings.order == "random":
            return uniform_integer(steps.start, last + 1, self.config.seed, WINDOW, step)
        starts = range(steps.start, last + 1, self.settings.stride)
        place = step // self.settings.iterations
        return starts[place % len(starts) if self.settings.wrap else min(place, len(starts) - 1)]
