"""The running mean of the adapter, smoother than the adapter itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def ema_decay(update: int, limit: float) -> float:
    """The decay of optimizer step `update` (1, 2, …): 1 - 1 / (update + 1) until that reaches `limit`.

    Early on this is the plain mean of all weights so far, so that the start is forgotten soon: Mean Teacher
    (arXiv 1703.01780, section 4.1 and its published code).
    """
    return min(1 - 1 / (update + 1), limit)


@torch.no_grad()
def update_ema(mean: Mapping[str, Tensor], parameters: Mapping[str, Tensor], decay: float) -> None:
    """mean <- decay mean + (1 - decay) parameters, in place and in the mean's dtype. Sharded tensors as the
    rank's own parts.
    """
    for name, tensor in mean.items():
        tensor.lerp_(parameters[name].to(tensor.dtype), 1 - decay)
