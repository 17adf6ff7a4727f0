"""AdamW and its learning rate."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from omnirl_hpc.config.schema import OptimizerConfig


def make_optimizer(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> tuple[AdamW, LambdaLR]:
    """AdamW, and a schedule that rises linearly over `warmup_updates` optimizer steps and then stays at `lr`.

    The optimizer's state is made at once, as AdamW would make it at its first step: checkpoints, offload and
    roll-back then always meet the same tensors.
    """
    beta1, beta2 = config.betas
    optimizer = AdamW(
        list(parameters.values()),
        lr=config.lr,
        betas=(beta1, beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    warmup = config.warmup_updates
    return optimizer, LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / warmup) if warmup else 1.0)


def optimizer_tensors(optimizer: AdamW, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state by the names of the parameters, independent of their order:
    `<parameter>.<state>`.
    """
    return {
        f"{name}.{key}": tensor
        for name, p in parameters.items()
        for key, tensor in optimizer.state[p].items()
    }
