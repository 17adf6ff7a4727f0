"""TempFlow-GRPO (arXiv 2508.04324): steps that explore more count more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Optional

from torch import Tensor

from omnirl_hpc.algorithms.flow_grpo import FlowGRPO, FlowGRPOConfig
from omnirl_hpc.algorithms.trajectory import TransitionPoint
from omnirl_hpc.algorithms.units import Batch
from omnirl_hpc.errors import require
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import mean_over_streams
from omnirl_hpc.sampling.transitions import transition_std
from omnirl_hpc.sampling.windows import trained_steps


@dataclass
class TempFlowGRPOConfig(FlowGRPOConfig):
    name: str = "tempflow_grpo"
    # A step is weighted by this times the standard deviation of its transition. null: so that the weights of
    # the steps that a window may hold have a mean of 1; authors' code: 1.53 (Qwen-Image), 2.25 (SD 3.5).
    weight_scale: Optional[float] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.weight_scale is None or self.weight_scale > 0,
            f"algorithm.weight_scale={self.weight_scale} must be greater than 0, or null",
        )


class TempFlowGRPO(FlowGRPO):
    """Flow-GRPO whose policy loss of a step is weighted by the noise of its transition, step size included
    (the paper's sigma_t sqrt(dt)), normalised. The KL term is not.

    This is the weighting of the paper, not its other part, the branching of trajectories at single steps.
    """

    Settings = TempFlowGRPOConfig
    settings: TempFlowGRPOConfig

    def training_points(self, batch: Batch, schedules: Mapping[str, Schedule]) -> Iterator[TransitionPoint]:
        scale = self.settings.weight_scale or 1 / self._mean_noise(schedules)
        for point in super().training_points(batch, schedules):
            # A weight of the policy loss is one of the advantage, whose sign it does not change.
            yield replace(point, advantages=point.advantages * scale * self._noise(point))

    def _noise(self, point: TransitionPoint) -> Tensor:
        """[B] the standard deviation of the transition, the mean over the elements of all streams."""
        deviations = {
            name: self._std(point.sigma[name], point.sigma_next[name], point.sigma_max[name])
            for name in point.latents
        }
        return mean_over_streams(deviations, point.latents)

    def _mean_noise(self, schedules: Mapping[str, Schedule]) -> float:
        """Over the steps that a window may hold, and over streams."""
        steps = list(trained_steps(self.config.sampling))
        means = [
            float(self._std(s.sigmas[steps], s.sigmas[[i + 1 for i in steps]], s.sigma_max).mean())
            for s in schedules.values()
        ]
        return sum(means) / len(means)

    def _std(self, sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor | float) -> Tensor:
        sampling = self.config.sampling
        return transition_std(sampling.transition, sigma, sigma_next, sampling.noise_level, sigma_max)
