"""GPUs that runs are planned for."""

from __future__ import annotations

from dataclasses import dataclass

from omnirl_hpc.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One device, as a rank sees it."""

    memory: float  # bytes, as the driver reports them
    flops: float  # dense bf16 peak, FLOP/s
    host_link: float  # bytes/s to and from host memory, each way, at its peak


PCIE4, PCIE5 = 32e9, 64e9  # x16, each way

# Peaks from the makers' data sheets, dense (half of what is printed for sparse). Memory as nvidia-smi and
# rocm-smi report it.
GPUS = {
    "a100-40": Gpu(40.0 * GIB, 312e12, PCIE4),  # NVIDIA A100 data sheet (nvidia-us-2188504)
    "a100-80": Gpu(80.0 * GIB, 312e12, PCIE4),
    "l40s": Gpu(45.0 * GIB, 362e12, PCIE4),  # NVIDIA L40S data sheet: 733 sparse; 46068 MiB with ECC
    "h100": Gpu(79.6 * GIB, 989e12, PCIE5),  # NVIDIA H100 data sheet, SXM: 1979 sparse; 81559 MiB
    "h200": Gpu(140.4 * GIB, 989e12, PCIE5),  # NVIDIA H200 data sheet, SXM: 1979 sparse; 143771 MiB
    "gh200": Gpu(
        95.6 * GIB, 989e12, 450e9
    ),  # NVIDIA GH200 data sheet, HBM3 96 GB; NVLink-C2C 900 GB/s both ways; 97871 MiB
    "b200": Gpu(
        179.0 * GIB, 2250e12, PCIE5
    ),  # NVIDIA Blackwell data sheet, HGX B200: 4500 sparse; 183359 MiB
    "mi250x": Gpu(
        64.0 * GIB, 191.5e12, 36e9
    ),  # AMD MI250X data sheet: 383 for both dies, a rank has one; Infinity Fabric
    "mi300a": Gpu(128.0 * GIB, 980e12, 450e9),  # AMD MI300A data sheet; memory is shared with the host
    "mi300x": Gpu(192.0 * GIB, 1307e12, PCIE5),  # AMD MI300X data sheet
}


def find_gpu(name: str) -> Gpu:
    """Raises ConfigError for one that is not in the table."""
    if name.lower() not in GPUS:
        raise ConfigError(f"gpu={name} is not known; it must be one of: {', '.join(GPUS)}")
    return GPUS[name.lower()]
