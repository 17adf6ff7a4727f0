"""The default process group and this rank's device."""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from typing import Iterator

import torch
import torch.distributed as dist

from omnirl_hpc.errors import ConfigError
from omnirl_hpc.launch.identity import Identity


def pick_device(identity: Identity) -> torch.device:
    """cuda:LOCAL_RANK where the rank sees several GPUs, cuda:0 where its launcher shows it one, cpu where there is none.

    The numbers in CUDA_VISIBLE_DEVICES are never read: their meaning differs between Slurm's ways of binding GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", identity.local_rank if torch.cuda.device_count() > 1 else 0)


@contextmanager
def process_group(identity: Identity, device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Form the default group (NCCL on GPUs, gloo on CPUs) and destroy it at the end.

    Every collective on it, the rendezvous included, fails after `timeout_seconds`. After an error the group is left as it is: the
    process ends, and taking leave of ranks that are stuck would only delay that. Raises ConfigError where the port is taken.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if identity.master_addr is None:  # alone: no port is opened
        store = dist.HashStore()
    else:
        store = dist.PrefixStore("omnirl_hpc", _rendezvous(identity, timeout))
    dist.init_process_group(backend, store=store, rank=identity.rank, world_size=identity.world_size, timeout=timeout)
    yield
    dist.destroy_process_group()


def _rendezvous(identity: Identity, timeout: timedelta) -> dist.Store:
    # torchrun's agent already serves the store; elsewhere rank 0 does
    serves = identity.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return dist.TCPStore(
            identity.master_addr, identity.master_port, identity.world_size, serves, timeout, wait_for_workers=False
        )
    except dist.DistNetworkError as error:
        if not serves:
            raise
        raise ConfigError(
            f"{identity}: cannot wait for the other ranks on port {identity.master_port}, which another program seems to have: "
            f"set another MASTER_PORT ({error})"
        ) from None
