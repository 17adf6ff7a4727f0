"""vLLM-Omni's diffusion worker as an object in a process that it does not own.

The stock worker takes a process for itself: it overwrites RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT, picks its GPU by global rank, rewrites sys.stdout and the process title, and destroys the default
process group at shutdown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import vllm_omni.diffusion.worker.diffusion_worker as stock
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.platforms import current_omni_platform

from omnirl_hpc.rollout.vllm_omni.groups import forget_replica_groups, init_replica_groups
from omnirl_hpc.rollout.vllm_omni.importing import keep_environment, keep_torch_settings
from omnirl_hpc.rollout.vllm_omni.versions import WORKER_TITLE


class SpmdWorker(stock.DiffusionWorker):
    """One rank of one replica. All ranks of the job construct it together."""

    rank: int  # in the replica

    def __init__(self, od_config: OmniDiffusionConfig, replica_size: int, device: torch.device) -> None:
        self._replica_size = replica_size
        self._device_index = device.index or 0
        with keep_environment(), keep_torch_settings(), self._our_process():
            super().__init__(
                local_rank=self._device_index, rank=dist.get_rank() % replica_size, od_config=od_config
            )

    def init_device(self) -> None:
        rank, self.rank = (
            self.rank,
            self._device_index,
        )  # the stock code takes the rank for the device's number
        try:
            super().init_device()
        finally:
            self.rank = rank

    def shutdown(self) -> None:
        with self._our_process():
            super().shutdown()

    @contextmanager
    def _our_process(self) -> Iterator[None]:
        """Replace, for the length of a `with` block, the functions that the stock worker takes the process
        over with.
        """

        def form_groups(**_: object) -> None:
            init_replica_groups(
                self.od_config.parallel_config,
                self._replica_size,
                self._device_index,
                current_omni_platform.dist_backend,
            )

        ours = {
            "init_distributed_environment": lambda **_: None,
            "initialize_model_parallel": form_groups,
            "destroy_distributed_env": forget_replica_groups,
            WORKER_TITLE: lambda **_: None,
        }
        original = {name: getattr(stock, name) for name in ours if hasattr(stock, name)}
        for name in original:
            setattr(stock, name, ours[name])
        try:
            yield
        finally:
            for name, function in original.items():
                setattr(stock, name, function)
