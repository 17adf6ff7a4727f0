"""PPO's clipped surrogate (arXiv 1707.06347), for the steps of a denoising chain and for tokens alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Surrogate:
    """Elementwise, in the shape of the log-ratios. Only `loss` has gradients."""

    loss: Tensor
    ratio: Tensor
    log_ratio: Tensor
    clipped: Tensor  # 1 where the ratio is out of range
    kl: Tensor  # of the old policy from the current one: rho - 1 - log rho, of low variance (Schulman 2020)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, valid: Tensor, clip_low: float, clip_high: float
) -> Surrogate:
    """max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) with rho = exp(log_ratio).

    log_ratio [B, …]; advantages and valid (bool) broadcast against it. Where an element is not valid its
    log-ratio counts as 0: a NaN times a zero gradient would still be a NaN gradient.
    """
    log_ratio = torch.where(valid, log_ratio, 0.0)
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    seen, log_seen = ratio.detach(), log_ratio.detach()
    outside = (seen - 1 > clip_high) | (1 - seen > clip_low)
    return Surrogate(loss, seen, log_seen, outside.float(), seen - 1 - log_seen)
