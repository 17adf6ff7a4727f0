"""The running mean of what is trained, smoother than the policy itself."""

from __future__ import annotations

from omnirl_hpc.policies import EMA, Blend


def ema_blend(update: int, limit: float) -> Blend:
    """What the mean does after optimizer step `update` (1, 2, …): decay 1 - 1 / (update + 1) until that
    reaches `limit`.

    Early on this is the plain mean of all weights so far, so that the start is forgotten soon: Mean Teacher
    (arXiv 1703.01780, section 4.1 and its published code).
    """
    return Blend(EMA, min(1 - 1 / (update + 1), limit))
