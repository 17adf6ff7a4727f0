"""Rank, local rank and world size, from whatever started this process. Needs neither torch nor Slurm's tools."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import dataclass
from typing import Mapping

from omnirl_hpc.errors import ConfigError


@dataclass(frozen=True)
class Identity:
    """This process among the ranks of the job."""

    launcher: str  # torchrun | srun | alone
    rank: int
    local_rank: int
    world_size: int
    master_addr: str | None = None  # None: alone
    master_port: int | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {socket.gethostname()} ({self.launcher})"


def find_identity(environ: Mapping[str, str] | None = None) -> Identity:
    """Read the launcher's environment variables.

    torchrun is asked first, since it may run inside an srun step. srun counts only inside a step (SLURM_STEP_ID): the batch
    shell of a job has SLURM_NTASKS too, but is one process.

    Raises ConfigError when the variables are incomplete or contradict each other.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ or "TORCHELASTIC_RUN_ID" in environ:
        identity = Identity(
            "torchrun",
            _integer(environ, "RANK"),
            _integer(environ, "LOCAL_RANK"),
            _integer(environ, "WORLD_SIZE"),
            _text(environ, "MASTER_ADDR"),
            _integer(environ, "MASTER_PORT"),
        )
    elif "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        world_size = _integer(environ, "SLURM_STEP_NUM_TASKS")
        identity = Identity(
            "srun",
            _integer(environ, "SLURM_PROCID"),
            _integer(environ, "SLURM_LOCALID"),
            world_size,
            environ.get("MASTER_ADDR") or _first_host(environ),
            _integer(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else slurm_port(environ),
        )
    else:
        identity = Identity("alone", 0, 0, 1)
    if not 0 <= identity.rank < identity.world_size:
        raise ConfigError(f"the launcher ({identity.launcher}) says rank {identity.rank} of {identity.world_size} ranks")
    return identity


def slurm_port(environ: Mapping[str, str]) -> int:
    """A rendezvous port that other jobs on the node, and this job before a requeue, do not use."""
    job, restart = _integer(environ, "SLURM_JOB_ID"), int(environ.get("SLURM_RESTART_COUNT") or 0)
    return 20000 + (job * 16 + restart) % 10000


def _first_host(environ: Mapping[str, str]) -> str:
    nodes = _text(environ, "SLURM_STEP_NODELIST")
    if not any(c in nodes for c in ",["):
        return nodes
    try:
        listing = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30, check=True)
    except (FileNotFoundError, subprocess.SubprocessError) as error:
        raise ConfigError(f"cannot expand SLURM_STEP_NODELIST={nodes} ({error}): export MASTER_ADDR in the job script") from None
    return listing.stdout.split()[0]


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ConfigError(f"{name} is not set, although the launcher's other variables are: start with torchrun or srun")
    return environ[name]


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text} is not a number") from None
