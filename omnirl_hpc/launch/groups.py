"""The default process group and this rank's device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from omnirl_hpc.errors import LaunchError
from omnirl_hpc.launch.identity import Identity
from omnirl_hpc.launch.rendezvous import Rendezvous


def pick_device(identity: Identity) -> torch.device:
    """cuda:LOCAL_RANK where the rank sees several GPUs, cuda:0 where its launcher shows it one, cpu where
    there is none.

    The numbers in CUDA_VISIBLE_DEVICES are never read: their meaning differs between Slurm's ways of binding
    GPUs. Raises LaunchError where there are fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    seen = torch.cuda.device_count()
    if seen > 1 and identity.local_rank >= seen:
        raise LaunchError(
            f"{identity} is number {identity.local_rank} on its node, which has {seen} GPUs for it: start "
            "one rank for each GPU "
            f"(--ntasks-per-node={seen}, --nproc-per-node {seen})"
        )
    return torch.device("cuda", identity.local_rank if seen > 1 else 0)


@contextmanager
def process_group(rendezvous: Rendezvous, device: torch.device) -> Iterator[None]:
    """Form the default group (NCCL on GPUs, gloo on CPUs) of the ranks that have met, and destroy it at the
    end.

    Every collective on it fails after the rendezvous' seconds. After an error the group is left as it is: the
    process ends, and taking leave of ranks that are stuck would only delay that.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=rendezvous.store,
        rank=rendezvous.identity.rank,
        world_size=rendezvous.identity.world_size,
        timeout=timedelta(seconds=rendezvous.seconds),
    )
    yield
    dist.destroy_process_group()
