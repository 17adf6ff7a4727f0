"""Flow-DPPO (arXiv 2606.11025): the exact divergence from the old policy in place of a clipped ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from omnirl_hpc.algorithms.scale import LogRatioScale, StepScale
from omnirl_hpc.algorithms.trajectory import (
    PolicyLoss,
    TrajectoryAlgorithm,
    TrajectoryConfig,
    TransitionPoint,
    divergence_per_element,
    step_log_prob,
)
from omnirl_hpc.errors import require
from omnirl_hpc.sampling.streams import Streams
from omnirl_hpc.sampling.transitions import Transition


@dataclass
class FlowDPPOConfig(TrajectoryConfig):
    """The threshold is that of the authors' code and of verl-omni's recipe."""

    name: str = "flow_dppo"
    kl_threshold: float = 1e-5  # of the divergence from the old policy, a mean over latent dimensions

    def __post_init__(self) -> None:
        require(self.kl_threshold > 0, f"algorithm.kl_threshold={self.kl_threshold} must be greater than 0")
        super().__post_init__()


class FlowDPPO(TrajectoryAlgorithm):
    """loss = mean M (-A rho), where M = 0 for a sample that is beyond the threshold and would go on:
    D > kl_threshold, and A > 0 with rho > 1 or A < 0 with rho < 1.

    D is the KL divergence of the two Gaussians, (mu - mu_old)^2 / (2 std^2), with the standard deviation of
    the whole transition whatever its kind. (verl-omni multiplies that of cps and dance, which have the step
    size in it, by sqrt|dt| once more.) Samples with M = 0 stay in the mean's denominator.
    """

    Settings = FlowDPPOConfig
    settings: FlowDPPOConfig
    range_key = "kl_threshold"
    compares_means = True

    def policy_loss(self, point: TransitionPoint, steps: Mapping[str, Transition]) -> PolicyLoss:
        old = cast(Streams, point.old_means)  # compares_means
        divergence = divergence_per_element(point, steps, old).detach()
        # A sample of weight 0 may not be finite, and a NaN times a zero gradient would still be a NaN.
        log_ratio = torch.where(point.weights > 0, step_log_prob(point, steps) - point.old_log_prob, 0.0)
        ratio = torch.exp(log_ratio)
        onwards = log_ratio.detach() * point.advantages > 0
        masked = onwards & (divergence > self.settings.kl_threshold)
        return PolicyLoss(
            torch.where(masked, 0.0, -point.advantages * ratio),
            {"ratio/mean": ratio.detach(), "masked_fraction": masked.float(), "divergence/old": divergence},
            {
                "ratio/max_abs_log": log_ratio.detach().abs().max(),
                "divergence/old_max": torch.where(point.weights > 0, divergence, 0.0).max(),
            },
        )

    def ratio_scale(self, streams: Sequence[StepScale]) -> LogRatioScale:
        """Of the divergence."""
        total = sum(stream.elements for stream in streams)
        return LogRatioScale(0.0, sum(s.elements * (s.slope / s.std) ** 2 / 2 for s in streams) / total)
