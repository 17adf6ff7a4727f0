"""AdamW with a learning rate that warms up. Expected values: the formulas, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from omnirl_hpc.actor.optimizer import make_optimizer
from omnirl_hpc.config.schema import OptimizerConfig


def learning_rates(warmup: int, updates: int) -> list[float]:
    optimizer, schedule = make_optimizer(
        {"w": nn.Parameter(torch.zeros(1))}, OptimizerConfig(lr=0.1, warmup_updates=warmup)
    )
    rates = []
    for _ in range(updates):
        rates.append(schedule.get_last_lr()[0])
        assert optimizer.param_groups[0]["lr"] == rates[-1]
        optimizer.step()
        schedule.step()
    return rates


def test_learning_rate_rises_linearly_and_stays():
    assert learning_rates(warmup=4, updates=6) == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_no_warmup():
    assert learning_rates(warmup=0, updates=3) == [0.1, 0.1, 0.1]


def test_first_step_is_adamws():
    """After bias correction the first step of Adam is lr * g / (|g| + eps), after the decay by lr *
    weight_decay.
    """
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    config = OptimizerConfig(lr=0.1, weight_decay=0.5, eps=1e-8)
    optimizer, _ = make_optimizer({"w": parameter}, config)
    parameter.grad = torch.tensor([3.0, -0.2])
    optimizer.step()
    torch.testing.assert_close(
        parameter.detach(), torch.tensor([1.0 * (1 - 0.05) - 0.1, -2.0 * (1 - 0.05) + 0.1])
    )


def test_betas_are_the_settings():
    """Second step with gradients 1 then 0: Adam's moments by hand for betas (0.5, 0.75)."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer, _ = make_optimizer(
        {"w": parameter}, OptimizerConfig(lr=1.0, betas=[0.5, 0.75], weight_decay=0.0)
    )
    for gradient in (1.0, 0.0):
        parameter.grad = torch.tensor([gradient])
        optimizer.step()
    first, second = 0.5 * 0.5 / (1 - 0.5**2), 0.75 * 0.25 / (1 - 0.75**2)
    assert float(parameter.detach()) == pytest.approx(-1 - first / second**0.5, rel=1e-6)
