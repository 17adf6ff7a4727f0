"""Flow-GRPO (arXiv 2505.05470): GRPO on the stochastic denoising steps of a flow-matching model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omnirl_hpc.algorithms.surrogate import clipped_surrogate
from omnirl_hpc.algorithms.trajectory import (
    PolicyLoss,
    TrajectoryAlgorithm,
    TrajectoryConfig,
    TransitionPoint,
    step_log_prob,
)
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import require
from omnirl_hpc.sampling.transitions import Transition


@dataclass
class FlowGRPOConfig(TrajectoryConfig):
    """PPO clipping of the likelihood ratio of stochastic denoising steps."""

    name: str = "flow_grpo"
    clip_range: float = (
        1e-5  # of the ratio; the log-probability is a mean over latent dimensions, hence so small
    )

    def __post_init__(self) -> None:
        require(self.clip_range > 0, f"algorithm.clip_range={self.clip_range} must be greater than 0")
        super().__post_init__()


class FlowGRPO(TrajectoryAlgorithm):
    """PPO clipping of rho = exp(log p - log p_old), and optionally a KL divergence to the reference:

    loss = mean max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) + beta KL (see TrajectoryAlgorithm)
    """

    Settings = FlowGRPOConfig
    settings: FlowGRPOConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not self.recomputes_old:
            self.tolerated_gap = self.settings.clip_range

    def policy_loss(self, point: TransitionPoint, steps: Mapping[str, Transition]) -> PolicyLoss:
        clip = self.settings.clip_range
        log_ratio = step_log_prob(point, steps) - point.old_log_prob
        made = clipped_surrogate(log_ratio, point.advantages, point.weights > 0, clip, clip)
        return PolicyLoss(
            made.loss,
            {"ratio/mean": made.ratio, "clip_fraction": made.clipped, "kl": made.kl},
            {"ratio/max_abs_log": made.log_ratio.abs().max()},
        )
