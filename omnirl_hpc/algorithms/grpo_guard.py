"""GRPO-Guard (arXiv 2510.22319): likelihood ratios of one scale at every step, and gradients of one size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from omnirl_hpc.algorithms.flow_grpo import FlowGRPO, FlowGRPOConfig, surrogate_loss
from omnirl_hpc.algorithms.scale import LogRatioScale, StepScale
from omnirl_hpc.algorithms.trajectory import PolicyLoss, TransitionPoint
from omnirl_hpc.errors import require
from omnirl_hpc.sampling.streams import Streams, map_streams, mean_over_streams
from omnirl_hpc.sampling.transitions import Transition


@dataclass
class GRPOGuardConfig(FlowGRPOConfig):
    """The clip range is that of verl-omni's recipe; its unit is not Flow-GRPO's."""

    name: str = "grpo_guard"
    clip_range: float = 2e-6  # of the normalised ratio
    rebalance: bool = True  # divide the loss of a step by its size |dt|

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.old_log_prob == "recompute",
            f"algorithm.old_log_prob={self.old_log_prob} is not for algorithm.name={self.name}, whose ratio "
            "is made of the means of the actor's old policy: set it to recompute",
        )


class GRPOGuard(FlowGRPO):
    """Flow-GRPO's loss with another ratio, divided by |dt|:

        log rho = std (log p - log p_old + (mu - mu_old)^2 / (2 std^2)) = (mu - mu_old) z

    where z = (x' - mu_old) / std is the noise that was drawn. The first form is the paper's: the term that is
    added brings the mean of the ratio to 1, and the factor gives all steps one scale. The second is the same
    without subtracting what is almost equal, and holds for every kind of transition, also for
    log-probabilities without a variance (cps). Since d mu / d v is about dt, dividing by |dt| makes the
    gradients of all steps equally large.

    The code of flow_grpo and verl-omni takes std and dt as means over a micro-batch. That is the same where
    all of its samples are at one step, and otherwise depends on who shares a micro-batch: not offered here.
    """

    Settings = GRPOGuardConfig
    settings: GRPOGuardConfig
    compares_means = True

    def policy_loss(self, point: TransitionPoint, steps: Mapping[str, Transition]) -> PolicyLoss:
        made = surrogate_loss(point, normalised_log_ratio(point, steps), self.settings.clip_range)
        if not self.settings.rebalance:
            return made
        sizes = map_streams(lambda sigma, after: sigma - after, point.sigma, point.sigma_next)
        return PolicyLoss(made.values / mean_over_streams(sizes, point.latents), made.means, made.maxima)

    def ratio_scale(self, streams: Sequence[StepScale]) -> LogRatioScale:
        total = sum(stream.elements for stream in streams)
        variance = sum(stream.elements * stream.slope**2 for stream in streams)
        return LogRatioScale(math.sqrt(variance) / total, 0.0)


def normalised_log_ratio(point: TransitionPoint, steps: Mapping[str, Transition]) -> Tensor:
    """[B] the mean over the elements of all streams of (mu - mu_old) (x' - mu_old) / std."""
    old = cast(Streams, point.old_means)  # compares_means
    products = {
        name: ((step.mean - old[name]) * (step.next_sample - old[name]) / step.std).flatten(1).mean(dim=1)
        for name, step in steps.items()
    }
    return mean_over_streams(products, point.latents)
