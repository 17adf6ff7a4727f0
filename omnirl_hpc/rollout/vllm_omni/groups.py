"""vLLM-Omni's process groups, one set for each replica, inside a default group that belongs to somebody else.

vLLM-Omni is told of one replica only (`num_gpus` = its size, no data parallelism); the other replicas do not
exist for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
import vllm.distributed.parallel_state as vllm_groups
import vllm_omni.diffusion.distributed.parallel_state as omni_groups
from vllm_omni.diffusion.data import DiffusionParallelConfig

from omnirl_hpc.rollout.vllm_omni.versions import accepted


def init_replica_groups(parallel: DiffusionParallelConfig, size: int, local_rank: int, backend: str) -> None:
    """Form the groups of this rank's replica of `size` consecutive ranks. Collective over the default group.

    The stock code runs over all ranks with the replicas as its outermost data-parallel axis, so that tensor,
    sequence and guidance groups come out inside each replica; then everything that still spans replicas is
    narrowed.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    replica = list(range(rank // size * size, (rank // size + 1) * size))
    with _own_groups_only():
        omni_groups._WORLD = omni_groups.init_world_group(list(range(world)), local_rank, backend)
        arguments = {
            "data_parallel_size": world // size,
            "cfg_parallel_size": parallel.cfg_parallel_size,
            "sequence_parallel_size": parallel.sequence_parallel_size,
            "ulysses_degree": parallel.ulysses_degree,
            "ring_degree": parallel.ring_degree,
            "allgather_degree": getattr(parallel, "allgather_degree", 1),
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "backend": backend,
        }
        omni_groups.initialize_model_parallel(**accepted(omni_groups.initialize_model_parallel, arguments))
        omni_groups._WORLD = omni_groups.init_world_group(replica, local_rank, backend)
        if vllm_groups._WORLD is None:
            vllm_groups._WORLD = vllm_groups.GroupCoordinator(
                group_ranks=[replica],
                local_rank=local_rank,
                torch_distributed_backend=backend,
                use_device_communicator=False,
                group_name="world",
            )
        vllm_groups._NODE_COUNT = 1
        alone = omni_groups.init_model_parallel_group([[rank]], local_rank, backend, parallel_mode="data")
        omni_groups._DP = vllm_groups._DP = alone


def forget_replica_groups() -> None:
    """Let vLLM forget its groups. None is destroyed before the default group is: vLLM would destroy that one
    too, and torch gives a destroyed group's name to the next one, which would then meet the old one's
    addresses in the store.
    """
    original = dist.destroy_process_group
    dist.destroy_process_group = lambda *_: None
    try:
        omni_groups.destroy_distributed_env()
    finally:
        dist.destroy_process_group = original


@contextmanager
def _own_groups_only() -> Iterator[None]:
    """Let new_group() form a group on its members alone: a constant number of groups for each rank, not one
    for each rank of the job. Every rank forms its groups in the same order, so ranks that share two groups
    cannot wait for each other.
    """
    original, rank = dist.new_group, dist.get_rank()

    @wraps(original)
    def new_group(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is None:
            return original(ranks, *args, **kwargs)
        if rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return original(ranks, *args, **{"use_local_synchronization": True, **kwargs})

    dist.new_group = new_group
    try:
        yield
    finally:
        dist.new_group = original
