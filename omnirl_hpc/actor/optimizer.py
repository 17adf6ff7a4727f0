"""AdamW and its learning rate."""

from __future__ import annotations

from typing import Iterable

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from omnirl_hpc.config.schema import OptimizerConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> tuple[AdamW, LambdaLR]:
    """AdamW, and a schedule that rises linearly over `warmup_updates` optimizer steps and then stays at `lr`."""
    optimizer = AdamW(
        parameters, lr=config.lr, betas=tuple(config.betas), eps=config.eps, weight_decay=config.weight_decay
    )
    warmup = config.warmup_updates
    return optimizer, LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / warmup) if warmup else 1.0)
