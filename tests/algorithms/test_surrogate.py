"""PPO's surrogate by hand, for one number a sample and for tokens."""

from __future__ import annotations

import math

import pytest
import torch

from omnirl_hpc.algorithms.surrogate import clipped_surrogate


def test_tokens_share_the_advantage_of_their_sample_and_the_range_may_be_lopsided():
    """By hand, max(-A rho, -A clip(rho, 1 - 0.2, 1 + 0.28)); what is masked out has no gradient,
    even if NaN.
    """
    ratios = torch.tensor([[1.25, 1.5, 0.5], [0.5, 1.5, 1.0]])
    log_ratio = ratios.log()
    log_ratio[1, 2] = math.nan
    log_ratio.requires_grad_()
    valid = torch.tensor([[True, True, True], [True, True, False]])
    made = clipped_surrogate(log_ratio, torch.tensor([[2.0], [-1.0]]), valid, 0.2, 0.28)
    expected = torch.tensor([[-2.5, -2.56, -1.0], [0.8, 1.5, 1.0]])
    torch.testing.assert_close(made.loss, expected)
    assert made.clipped.tolist() == [[0, 1, 1], [1, 1, 0]]
    torch.testing.assert_close(made.kl[0], ratios[0] - 1 - ratios[0].log())
    made.loss.sum().backward()
    # d(-A rho)/d(log rho) = -A rho where the unclipped branch is taken
    torch.testing.assert_close(log_ratio.grad, torch.tensor([[-2.5, 0.0, -1.0], [0.0, 1.5, 0.0]]))


@pytest.mark.parametrize("name", ["ratio", "log_ratio", "clipped", "kl"])
def test_only_the_loss_has_gradients(name):
    log_ratio = torch.zeros(2, requires_grad=True)
    made = clipped_surrogate(log_ratio, torch.ones(2), torch.ones(2, dtype=torch.bool), 0.1, 0.1)
    assert made.loss.requires_grad and not getattr(made, name).requires_grad
