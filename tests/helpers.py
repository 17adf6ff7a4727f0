"""What tests that run models and process groups share."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from omnirl_hpc.checks.rules import check
from omnirl_hpc.config.load import LoadedConfig, load_config
from omnirl_hpc.config.schema import Config
from omnirl_hpc.launch.runtime import prepare_process
from omnirl_hpc.layout import Layout
from omnirl_hpc.models.lora import lora_parameters
from omnirl_hpc.sampling.noise import standard_normal

prepare_process(threads_per_rank=1)

CPU = torch.device("cpu")
ALONE = Layout(rank=0, world_size=1, replica_size=1, shard_size=1)

# Not square, so that height and width cannot be swapped unseen; 6 latent tokens.
SMALL = (
    "recipe=flowgrpo_tiny",
    "model.height=32",
    "model.width=48",
    "data.prompts_per_step=4",
    "data.samples_per_prompt=2",
    "sampling.num_inference_steps=4",
    "sampling.window.last=3",
    "rollout.micro_batch_size=2",
    "actor.micro_batch_size=2",
    "actor.lora.rank=4",
)


def load_small(tiny_model: Path, tiny_prompts: Path, run_dir: Path, *overrides: str) -> LoadedConfig:
    """The demo recipe on images of 32 x 48 pixels, checked as for one rank."""
    paths = (f"model.path={tiny_model}", f"data.prompts={tiny_prompts}", f"run_dir={run_dir}")
    loaded = load_config([*SMALL, *paths, *overrides])
    check(loaded.config, world_size=1)
    return loaded


def make_config(tiny_model: Path, tiny_prompts: Path, run_dir: Path, *overrides: str) -> Config:
    return load_small(tiny_model, tiny_prompts, run_dir, *overrides).config


def go_on() -> None:
    """A check for a stop request that never comes."""


def fill_adapter(transformer: nn.Module, seed: int, scale: float = 0.1) -> None:
    """Random values in both LoRA matrices, sharded or not: with the initial B = 0 an adapter does nothing."""
    with torch.no_grad():
        for name, parameter in lora_parameters(transformer).items():
            values = scale * standard_normal(parameter.shape, seed, name)
            if isinstance(parameter, DTensor):
                values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
            parameter.copy_(values)


@contextmanager
def one_rank_group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_ranks(count: int, function: Callable[..., Any], *args: Any, deadline: float = 150.0) -> list[Any]:
    """function(*args) on `count` new ranks of one gloo group; what each returns. A rank's exception is raised
    here.

    Ranks are forked off a process that has imported what they need and has done nothing else: importing
    takes most of the time of most tests.
    """
    mp.get_context("forkserver").set_forkserver_preload(["tests.helpers", "omnirl_hpc.trainer"])
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(
            _rank,
            (count, folder, deadline, dict(os.environ), function, args),
            nprocs=count,
            join=False,
            start_method="forkserver",
        )
        end = time.monotonic() + deadline
        try:
            while not ranks.join(timeout=1.0):
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"{function.__name__} on {count} ranks is not done after {deadline:.0f} s"
                    )
        finally:
            for process in ranks.processes:
                process.kill()
        return [torch.load(Path(folder) / f"result_{rank}.pt", weights_only=False) for rank in range(count)]


def _rank(
    rank: int,
    count: int,
    folder: str,
    deadline: float,
    environ: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()  # a forked rank has what was set when the first one of this test run started
    os.environ.update(environ)
    store = dist.FileStore(f"{folder}/store", count)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=deadline)
    )
    torch.save(function(*args), Path(folder) / f"result_{rank}.pt")
    dist.destroy_process_group()
