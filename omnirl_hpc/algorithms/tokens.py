"""Policy gradients on tokens: GRPO, DAPO and GSPO as functions of log-probabilities, for models that write.

No recipe trains such a model yet; the functions know none. A micro-batch has B sequences of up to T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from omnirl_hpc.algorithms.algorithm import LossOutput
from omnirl_hpc.algorithms.surrogate import Surrogate, clipped_surrogate


@dataclass(frozen=True)
class TokenPoint:
    """What a loss is made of; all [B, T] are fp32 but for the mask."""

    old_log_prob: Tensor  # [B, T], of the policy that wrote the tokens
    mask: Tensor  # [B, T] bool: the tokens that it wrote, and not the prompt's or padding
    advantages: Tensor  # [B] fp32, of each sequence
    # [B] fp32, of a sequence in the loss: `sequence_weights` or `token_weights` of the whole update
    weights: Tensor
    reference_log_prob: Tensor | None = None  # [B, T], where a divergence from the reference is added


def sequence_weights(mask: Tensor) -> Tensor:
    """[N] weights of the sequences of an update, mask [N, T], with which each counts equally; one without
    tokens counts nothing.
    """
    counted = mask.any(dim=1).float()
    return counted / counted.sum().clamp(min=1)


def token_weights(mask: Tensor) -> Tensor:
    """[N] weights with which each token of an update counts equally, as DAPO's token-level loss has it: a
    sequence weighs as many as it has. They belong to losses that are means over a sequence's tokens.
    """
    lengths = mask.sum(dim=1).float()
    return lengths / lengths.sum().clamp(min=1)


def grpo_loss(
    point: TokenPoint, log_prob: Tensor, clip_range: float = 0.2, kl_coef: float = 0.0
) -> LossOutput:
    """GRPO (arXiv 2402.03300): PPO's clipped ratio of each token, a mean over the tokens of a sequence, and
    kl_coef times the divergence from the reference, estimated by exp(d) - 1 - d with d = log p_ref - log p.

    log_prob: [B, T], of the current policy, with gradients. With `sequence_weights`.
    """
    return _token_loss(point, log_prob, clip_range, clip_range, kl_coef)


def dapo_loss(
    point: TokenPoint, log_prob: Tensor, clip_low: float = 0.2, clip_high: float = 0.28
) -> LossOutput:
    """DAPO (arXiv 2503.14476): GRPO's with a wider range above ("clip-higher"), and no divergence. With
    `token_weights`; its two other parts are `overlong_penalty` and data.refill_rounds.
    """
    return _token_loss(point, log_prob, clip_low, clip_high, 0.0)


def gspo_loss(
    point: TokenPoint, log_prob: Tensor, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> LossOutput:
    """GSPO (arXiv 2507.18071): one ratio for a sequence, (p / p_old)^(1 / length), which is clipped as a
    whole. With `sequence_weights`. The ranges are the paper's.
    """
    log_ratio = _mean(_log_ratio(point, log_prob), point.mask)
    made = clipped_surrogate(log_ratio, point.advantages, point.weights > 0, clip_low, clip_high)
    return _output(point, made, made.loss, lambda values: values)


def overlong_penalty(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """[N] what DAPO adds to the reward of sequences of `lengths` [N] tokens: 0 up to longest - buffer, then
    linearly down to -1 at `longest` and beyond.

    Raises ValueError for a buffer that is not between 1 and `longest`.
    """
    if not 1 <= buffer <= longest:
        raise ValueError(f"buffer={buffer} must be between 1 and longest={longest}")
    return ((longest - buffer - lengths).float() / buffer).clamp(-1, 0)


def _token_loss(
    point: TokenPoint, log_prob: Tensor, clip_low: float, clip_high: float, kl_coef: float
) -> LossOutput:
    counted = point.mask & (point.weights > 0)[:, None]
    log_ratio = _log_ratio(point, log_prob)
    made = clipped_surrogate(log_ratio, point.advantages[:, None], counted, clip_low, clip_high)
    losses, means = made.loss, {}
    if kl_coef > 0:
        if point.reference_log_prob is None:
            raise ValueError(f"kl_coef={kl_coef} needs the log-probabilities of the reference")
        behind = torch.where(counted, point.reference_log_prob - log_prob, 0.0)
        divergence = torch.exp(behind) - 1 - behind
        losses = losses + kl_coef * divergence
        means["kl_reference"] = _mean(divergence.detach(), point.mask)
    return _output(point, made, _mean(losses, counted), lambda values: _mean(values, point.mask), means)


def _output(
    point: TokenPoint,
    made: Surrogate,
    losses: Tensor,
    of_sequence: Callable[[Tensor], Tensor],
    means: dict[str, Tensor] | None = None,
) -> LossOutput:
    """losses: [B]; of_sequence: what the surrogate has -> [B]."""
    loss = torch.where(point.weights > 0, losses * point.weights, 0.0).sum()
    reported = {"ratio/mean": made.ratio, "clip_fraction": made.clipped, "kl": made.kl}
    averages = {name: of_sequence(values) for name, values in reported.items()} | (means or {})
    return LossOutput(loss, averages, {"ratio/max_abs_log": made.log_ratio.abs().max()})


def _log_ratio(point: TokenPoint, log_prob: Tensor) -> Tensor:
    """[B, T]; 0 where there is no token, whatever stands there."""
    return torch.where(point.mask, log_prob - point.old_log_prob, 0.0)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B] means over the tokens of each sequence; 0 where it has none."""
    return torch.where(mask, values, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
