"""What one rank sees of its device, its node and the run directory. Nothing here judges."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from omnirl_hpc import installation
from omnirl_hpc.checks.preflight import host_memory
from omnirl_hpc.checks.preflight.model_files import find_problems
from omnirl_hpc.config.schema import Config
from omnirl_hpc.launch.identity import Identity

NOT_GIVEN = "-"  # the value of a path that a preflight by hand leaves out
SEEN_SECONDS = 5.0  # a network file system may take its time to show a file that another node has made


@dataclass(frozen=True)
class NodeFacts:
    """What is the same for all ranks of a node; its first rank looks."""

    packages: dict[str, str | None]
    source: str  # hash of this package's code
    container: str | None
    memory_available: int  # bytes, by the kernel's estimate
    memory_allowed: int | None  # bytes, by a cgroup's limit
    model_problems: list[str]
    hub_offline: bool


@dataclass(frozen=True)
class RankFacts:
    """What one rank sees."""

    rank: int
    host: str
    device: str
    gpu_name: str | None
    gpu_id: str | None
    gpu_free: int  # bytes; 0 without a GPU
    gpu_total: int
    clock: float  # seconds since the epoch, when rank 0 gave the sign
    run_dir_problem: str | None
    node: NodeFacts | None

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def observe(config: Config, identity: Identity, device: torch.device, probe: str) -> RankFacts:
    """Call on every rank as soon as rank 0 has given the sign: its time is compared. `probe`: the file that
    rank 0 made.
    """
    clock = time.time()
    gpu_name = gpu_id = None
    free = total = 0
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu_name, gpu_id = properties.name, str(properties.uuid)
        free, total = torch.cuda.mem_get_info(device)
    return RankFacts(
        rank=identity.rank,
        host=socket.gethostname(),
        device=str(device),
        gpu_name=gpu_name,
        gpu_id=gpu_id,
        gpu_free=free,
        gpu_total=total,
        clock=clock,
        run_dir_problem=None
        if config.run_dir == NOT_GIVEN
        else find_run_dir_problem(Path(config.run_dir), probe),
        node=observe_node(config) if identity.local_rank == 0 else None,
    )


def observe_node(config: Config) -> NodeFacts:
    return NodeFacts(
        packages=installation.packages(),
        source=installation.source_hash(),
        container=installation.container(),
        memory_available=host_memory.available(),
        memory_allowed=host_memory.allowed(),
        model_problems=[] if config.model.path == NOT_GIVEN else find_problems(Path(config.model.path)),
        hub_offline=os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
    )


def make_probe(config: Config) -> str:
    """Make a file in run_dir, by which other nodes recognise it; returns its name. Rank 0 only. "" where it
    cannot be made.
    """
    if config.run_dir == NOT_GIVEN:
        return ""
    name = f".preflight.{os.getpid()}.{time.time_ns()}"
    try:
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)
        (Path(config.run_dir) / name).write_text(name)
    except OSError:
        return ""  # rank 0's own facts say why
    return name


def find_run_dir_problem(run_dir: Path, probe: str) -> str | None:
    """Why this rank cannot use the folder that rank 0 uses."""
    if not run_dir.is_dir():
        return "does not exist there"
    if not os.access(run_dir, os.W_OK | os.X_OK):
        return "cannot be written to"
    if not probe:
        return None  # what rank 0 could not make cannot be looked for
    end = time.monotonic() + SEEN_SECONDS
    while not (run_dir / probe).exists():
        if time.monotonic() > end:
            return "is another folder than rank 0's: a file that rank 0 made there is not seen"
        time.sleep(0.1)
    return None
