"""Can all ranks reach each other, and how fast?"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from omnirl_hpc.checks.preflight.findings import OK, SKIPPED, Finding
from omnirl_hpc.errors import EXIT_FAILED, LaunchError
from omnirl_hpc.launch.identity import Identity

MIB = 2**20
SIZES = {"cuda": (MIB, 64 * MIB, 512 * MIB), "cpu": (MIB, 16 * MIB)}  # bytes, for a preflight by hand
QUICK_SIZES = {"cuda": (64 * MIB,), "cpu": (MIB,)}  # before every run
REPEATS = 3


def measure_all_reduce(
    identity: Identity, device: torch.device, sizes: Sequence[int], seconds: float
) -> Finding:
    """Collective. Raises LaunchError where the sum is wrong or a rank breaks off.

    The bandwidth is the bus bandwidth of nccl-tests, 2 (n - 1) / n x size / time: what each rank's link
    carries, for any number of ranks n.
    """
    if identity.world_size == 1:
        return Finding(
            SKIPPED,
            "all-reduce",
            "one rank: start it on the nodes (srun omnirl-hpc doctor …) to measure the network",
        )
    n, parts = identity.world_size, []
    with _ends_within(seconds, identity):
        for size in sizes:
            try:
                took = _time(size, identity, device)
            except RuntimeError as error:
                raise LaunchError(
                    f"{identity}: the all-reduce broke off: {str(error).splitlines()[0]}"
                ) from None
            parts.append(f"{size // MIB} MiB {2 * (n - 1) / n * size / took / 1e9:.3g} GB/s")
    return Finding(OK, "all-reduce", f"{dist.get_backend()}, {n} ranks: {', '.join(parts)}")


def _time(size: int, identity: Identity, device: torch.device) -> float:
    """Seconds of one all-reduce of fp32 tensors of `size` bytes. The first one sets up connections, and is
    looked at.
    """
    n = identity.world_size
    tensor = torch.full((size // 4,), identity.rank + 1.0, device=device)
    dist.all_reduce(tensor)
    if not bool((tensor == n * (n + 1) / 2).all()):
        raise LaunchError(
            f"{identity}: an all-reduce gave a wrong sum: the network, its driver or this GPU is broken"
        )
    _wait(device)
    start = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(tensor)
    _wait(device)
    return (time.perf_counter() - start) / REPEATS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _ends_within(seconds: float, identity: Identity) -> Iterator[None]:
    """End this process with a sentence if the body hangs: NCCL, setting up connections, comes back for no
    deadline of torch's.
    """

    def give_up() -> None:
        print(
            f"{identity}: the all-reduce did not end within {seconds:.0f} s: all ranks have started, but "
            "cannot reach each other over their fast network; NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names "
            "the interface, NCCL_DEBUG=INFO says more",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_FAILED)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
