"""Rollout correction: what is done about samples that the engine and the actor see differently.

Engine and actor are one policy, but for rounding, other kernels and other precisions. A sample is then drawn
from the engine's policy and learned from as if it were the actor's. Weights by the ratio of the two, cut off
from above (truncated importance sampling), make up for it; samples whose ratio is far off can be left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from omnirl_hpc.errors import one_of, require

LEVELS = ("step", "sequence", None)


@dataclass
class CorrectionConfig:
    """Ratios are those of the actor's probability before the first update and the engine's. Log-probabilities
    are means over latent dimensions, so that ratios are as close to 1 as clip ranges are small.
    """

    # step: weights are the ratios of single steps | sequence: the product over the steps of a sample | null
    importance: Optional[str] = None
    importance_limit: float = 2.0  # larger weights are cut off
    # step: leave out steps whose ratio is out of range | sequence: samples, by the geometric mean over their
    # steps | null
    rejection: Optional[str] = None
    rejection_low: float = 0.5
    rejection_high: float = 2.0
    rejected_in_denominator: bool = False  # what is left out counts in the mean as 0; false: not at all

    def __post_init__(self) -> None:
        one_of("algorithm.correction.importance", self.importance, LEVELS)
        one_of("algorithm.correction.rejection", self.rejection, LEVELS)
        limit, low, high = self.importance_limit, self.rejection_low, self.rejection_high
        require(limit > 0, f"algorithm.correction.importance_limit={limit} must be greater than 0")
        require(
            0 <= low < 1 < high,
            f"algorithm.correction.rejection_low={low}, algorithm.correction.rejection_high={high} must hold "
            "1 between them, where engine and actor agree",
        )

    @property
    def active(self) -> bool:
        return self.importance is not None or self.rejection is not None


@dataclass(frozen=True)
class Correction:
    """Of B samples at W steps."""

    importance: Tensor  # [B, W] fp32, factor of the policy loss
    kept: Tensor  # [B, W] bool


def correct(log_ratios: Tensor, settings: CorrectionConfig) -> Correction:
    """log_ratios [B, W]: log p of the actor - log p of the engine, of all steps of each sample. One that is
    not a number is not kept where anything is rejected.
    """
    importance = torch.ones_like(log_ratios)
    if settings.importance is not None:
        of_level = log_ratios if settings.importance == "step" else log_ratios.sum(dim=1, keepdim=True)
        importance = of_level.clamp(max=math.log(settings.importance_limit)).exp().expand_as(log_ratios)
    kept = torch.ones_like(log_ratios, dtype=torch.bool)
    if settings.rejection is not None:
        of_level = log_ratios if settings.rejection == "step" else log_ratios.mean(dim=1, keepdim=True)
        ratio = of_level.exp()
        kept = ((ratio >= settings.rejection_low) & (ratio <= settings.rejection_high)).expand_as(log_ratios)
    return Correction(importance, kept)
