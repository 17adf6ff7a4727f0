"""Which attention kernels a network runs: torch chooses among several, and an import may change that."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile

# What torch's scaled_dot_product_attention ends in -> the name that is shown
TORCH_KERNELS = {
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN",
    "aten::_scaled_dot_product_flash_attention": "flash (torch)",
    "aten::_scaled_dot_product_efficient_attention": "memory-efficient (torch)",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash for CPUs (torch)",
    "aten::_scaled_dot_product_attention_math": "math (torch)",
    "aten::_scaled_dot_product_fused_attention_overrideable": "the device's own (torch)",
}
PACKAGES = ("flash_attn", "fa2", "fa3", "fmha", "sage")  # in the names of other packages' operations


def observe_attention(network: nn.Module, found: Callable[[str], None]) -> None:
    """Call `found` once, with the names of the attention kernels of the first forward pass of `network`.

    They are read from the operations that torch's profiler sees in that pass, compiled or not; a pass that
    ends in an error before its first attention does not count.
    """
    running: list[profile] = []

    def start(*_: Any) -> None:
        running.append(profile(activities=[ProfilerActivity.CPU]))
        running[0].start()

    def stop(*_: Any) -> None:
        profiler = running.pop()
        profiler.stop()
        if names := attention_kernels(event.name for event in profiler.events()):
            before.remove()
            after.remove()
            found(" and ".join(names))

    before = network.register_forward_pre_hook(start)
    after = network.register_forward_hook(stop, always_call=True)


def attention_kernels(operations: Iterable[str]) -> list[str]:
    """The attention kernels among the names of operations, without repetitions."""
    operations = sorted(set(operations))
    ours = [shown for name, shown in TORCH_KERNELS.items() if name in operations]
    others = [
        name
        for name in operations
        if not name.startswith("aten::") and "::" in name and any(package in name for package in PACKAGES)
    ]
    return ours + others
