"""Peak memory of this process."""

from __future__ import annotations

import resource
import sys

import torch


class DevicePeaks:
    """The most GPU memory that tensors took in each phase of a step, and that torch held for them, in GiB; 0
    on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: dict[str, float] = {}
        self._reserved = 0.0

    def book(self, phase: str) -> None:
        """Count the peak since the last call to `phase`, and start again."""
        peak = 0.0
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) / 2**30
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device) / 2**30)
            torch.cuda.reset_peak_memory_stats(self._device)
        self._peaks[phase] = max(self._peaks.get(phase, 0.0), peak)

    def take(self) -> dict[str, float]:
        """memory/<phase>_peak, memory/device_reserved (with the allocator's gaps), memory/host_peak
        (resident), all in GiB.
        """
        taken = {f"memory/{phase}_peak": peak for phase, peak in self._peaks.items()}
        taken["memory/device_reserved"] = self._reserved
        self._peaks.clear()
        self._reserved = 0.0
        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
        return taken | {"memory/host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
