"""Peak memory of this process."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory(device: torch.device) -> dict[str, float]:
    """memory/device_peak: GiB allocated by torch on the GPU since the last call (0 on a CPU); memory/host_peak: GiB resident."""
    device_peak = 0.0
    if device.type == "cuda":
        device_peak = torch.cuda.max_memory_allocated(device) / 2**30
        torch.cuda.reset_peak_memory_stats(device)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
    host_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    return {"memory/device_peak": device_peak, "memory/host_peak": host_peak}
