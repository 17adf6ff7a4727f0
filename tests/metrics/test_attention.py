"""The attention kernel is seen, not assumed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from omnirl_hpc.metrics.attention import attention_kernels, observe_attention


class Attention(nn.Module):
    """One attention with a mask, as all of ours are, after whatever it is told to do first."""

    def __init__(self, first=lambda: None) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first()
        mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device)
        return nn.functional.scaled_dot_product_attention(x, x, x, mask)


X = torch.randn(1, 2, 8, 16)


@pytest.mark.parametrize(
    ("backend", "shown"),
    [(SDPBackend.FLASH_ATTENTION, "flash for CPUs (torch)"), (SDPBackend.MATH, "math (torch)")],
)
def test_the_kernel_that_runs_is_named_once(backend, shown):
    network, found = Attention(), []
    observe_attention(network, found.append)
    with sdpa_kernel(backend):
        assert torch.equal(network(X), network(X))
    assert found == [shown]
    assert not network._forward_hooks and not network._forward_pre_hooks  # the next passes are as they were


def test_a_setting_that_changes_the_kernel_is_seen():
    """As where an import turns one off for the whole process: the settings of the run have not changed."""
    found = []
    for allowed in (True, False):
        torch.backends.cuda.enable_flash_sdp(allowed)
        try:
            network = Attention()
            observe_attention(network, found.append)
            network(X)
        finally:
            torch.backends.cuda.enable_flash_sdp(True)
    assert found == ["flash for CPUs (torch)", "math (torch)"]


def test_a_pass_that_fails_before_its_attention_does_not_count():
    failures = [RuntimeError("no memory")]

    def fail_once() -> None:
        if failures:
            raise failures.pop()

    network, found = Attention(fail_once), []
    observe_attention(network, found.append)
    with pytest.raises(RuntimeError, match="no memory"):
        network(X)
    assert found == []
    network(X)
    assert len(found) == 1


def test_kernels_of_other_packages_keep_their_names():
    flash, fa3 = "flash_attn::_flash_attn_varlen_forward", "_vllm_fa3_C::fwd"
    assert attention_kernels(["aten::mm", flash, fa3, "aten::_softmax", "cudaLaunch", flash]) == [fa3, flash]


def test_cudnn_is_told_from_torchs_other_kernels():
    cudnn = "aten::_scaled_dot_product_cudnn_attention"
    assert attention_kernels(["aten::scaled_dot_product_attention", cudnn]) == ["cuDNN"]
    assert attention_kernels(["aten::_scaled_dot_product_efficient_attention", cudnn]) == [
        "cuDNN",
        "memory-efficient (torch)",
    ]
