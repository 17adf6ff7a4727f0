"""Rank, local rank and world size, from whatever started this process. Needs neither torch nor Slurm's tools.

MPI is only a launcher here (mpirun, mpiexec, `srun --mpi=…`): ranks talk through torch. mpi4py is asked for
one thing, the address of rank 0, where neither the user nor Slurm says it.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from omnirl_hpc.errors import ConfigError

# rank, size, then local rank by the names that different launchers have for it
MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    (
        "PMI_RANK",
        "PMI_SIZE",
        "PMI_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "PALS_LOCAL_RANKID",
    ),  # MPICH, Intel MPI, Cray PALS
)


@dataclass(frozen=True)
class Identity:
    """This process among the ranks of the job."""

    launcher: str  # torchrun | srun | mpi | alone
    rank: int
    local_rank: int
    world_size: int
    master_addr: str | None = None  # None: alone
    master_port: int | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {socket.gethostname()} ({self.launcher})"


def find_identity(environ: Mapping[str, str] | None = None) -> Identity:
    """Read the launcher's environment variables.

    torchrun is asked first, since it may run inside an srun step, then MPI, whose mpirun starts its own
    daemons with srun. srun counts only inside a step (SLURM_STEP_ID): the batch shell of a job has
    SLURM_NTASKS too, but is one process.

    Raises ConfigError when the variables are incomplete or contradict each other.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ or "TORCHELASTIC_RUN_ID" in environ:
        _require_one_torchrun(environ)
        identity = Identity(
            "torchrun",
            _integer(environ, "RANK"),
            _integer(environ, "LOCAL_RANK"),
            _integer(environ, "WORLD_SIZE"),
            _text(environ, "MASTER_ADDR"),
            _integer(environ, "MASTER_PORT"),
        )
    elif mpi := _mpi_variables(environ):
        identity = _mpi_identity(environ, mpi)
    elif "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        _require_pmix_agrees(environ)
        world_size = _integer(environ, "SLURM_STEP_NUM_TASKS")
        identity = Identity(
            "srun",
            _integer(environ, "SLURM_PROCID"),
            _integer(environ, "SLURM_LOCALID"),
            world_size,
            environ.get("MASTER_ADDR") or _first_host(_text(environ, "SLURM_STEP_NODELIST")),
            _integer(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else slurm_port(environ),
        )
    else:
        identity = Identity("alone", 0, 0, 1)
    if not 0 <= identity.rank < identity.world_size:
        raise ConfigError(
            f"the launcher ({identity.launcher}) says rank {identity.rank} of {identity.world_size} ranks"
        )
    return identity


def _require_one_torchrun(environ: Mapping[str, str]) -> None:
    """Where srun or mpirun starts torchrun, each task must be an agent of the same torchrun."""
    # agents; ranks, where somebody set torchrun's variables by hand
    name = "GROUP_WORLD_SIZE" if "GROUP_WORLD_SIZE" in environ else "WORLD_SIZE"
    outer = [("srun", "SLURM_STEP_NUM_TASKS")] if "SLURM_STEP_ID" in environ else []
    outer += [("mpirun", size) for _, size, *_ in MPI_VARIABLES if size in environ]
    for launcher, count in outer:
        if _integer(environ, name) < _integer(environ, count):
            raise ConfigError(
                f"torchrun says {environ[name]} ({name}), {launcher} has started {environ[count]} tasks "
                f"({count}): each would be a run of its own; start torchrun in one task, or in all with "
                f"--nnodes={environ[count]}"
            )


def slurm_job(environ: Mapping[str, str]) -> str | None:
    """The Slurm job in words, clusters that share a file system told apart; None outside of one."""
    if "SLURM_JOB_ID" not in environ:
        return None
    cluster = environ.get("SLURM_CLUSTER_NAME")
    return f"slurm job {environ['SLURM_JOB_ID']}{f' of {cluster}' if cluster else ''}"


def slurm_restart(environ: Mapping[str, str]) -> int:
    """How often Slurm has requeued the job."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


def slurm_port(environ: Mapping[str, str]) -> int:
    """A rendezvous port that other jobs on the node, and this job before a requeue, do not use."""
    return 20000 + (_integer(environ, "SLURM_JOB_ID") * 16 + slurm_restart(environ)) % 10000


def _mpi_variables(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The names of an MPI launcher's variables for rank, size and local rank; None where there is none, or
    srun says the same.
    """
    for rank, size, *local_ranks in MPI_VARIABLES:
        if rank in environ and size in environ:
            slurm = (environ.get("SLURM_PROCID"), environ.get("SLURM_STEP_NUM_TASKS"))
            if "SLURM_STEP_ID" in environ and (environ[rank], environ[size]) == slurm:
                return None  # srun --mpi=pmi2 or cray_shasta
            return rank, size, next((name for name in local_ranks if name in environ), local_ranks[0])
    return None


def _mpi_identity(environ: Mapping[str, str], names: tuple[str, str, str]) -> Identity:
    rank, size, local_rank = (_integer(environ, name) for name in names)
    if "SLURM_STEP_ID" in environ:
        _require_step_of_daemons(environ, names[1])
    elif (tasks := environ.get("SLURM_NTASKS")) and tasks != str(size):
        raise ConfigError(
            f"MPI says {size} ranks ({names[1]}), the Slurm job has {tasks} tasks: this MPI does not know "
            "Slurm, "
            "or was given another number; start with srun, or with mpirun -n $SLURM_NTASKS"
        )
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if "SLURM_JOB_ID" in environ and "SLURM_JOB_NODELIST" in environ:
        address = address or _first_host(environ["SLURM_JOB_NODELIST"])
        port = port or str(slurm_port(environ))
    if not address or not port:
        address, port = _ask_rank_0(size)
    return Identity("mpi", rank, local_rank, size, address, _integer({"MASTER_PORT": port}, "MASTER_PORT"))


def _require_step_of_daemons(environ: Mapping[str, str], size: str) -> None:
    """On other nodes than the first, mpirun's ranks stand in the step of its daemons, which are one on each
    node, and not more than ranks. In any other step MPI and Slurm must agree.
    """
    tasks = _integer(environ, "SLURM_STEP_NUM_TASKS")
    if _integer(environ, size) < tasks or tasks > int(environ.get("SLURM_STEP_NUM_NODES") or tasks):
        raise ConfigError(
            f"MPI says {environ[size]} ranks ({size}), the Slurm step has {tasks} tasks "
            "(SLURM_STEP_NUM_TASKS): each task would be "
            "a run of its own; start with srun alone, or with mpirun alone (left from an outer shell: unset "
            f"{size})"
        )


def _require_pmix_agrees(environ: Mapping[str, str]) -> None:
    """srun --mpi=pmix gives no size, but the rank twice."""
    pmix = environ.get("PMIX_RANK")
    if pmix is not None and pmix != environ["SLURM_PROCID"]:
        raise ConfigError(
            f"PMIX_RANK={pmix} and SLURM_PROCID={environ['SLURM_PROCID']} contradict each other: start with "
            "srun alone"
        )


def _ask_rank_0(size: int) -> tuple[str, str]:
    """Rank 0's host and a free port there, through MPI itself."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ConfigError(
            "started by MPI outside of Slurm: export MASTER_ADDR and MASTER_PORT, or pip install '.[mpi]' "
            f"({error})"
        ) from None
    world = MPI.COMM_WORLD
    if world.size != size:
        raise ConfigError(
            f"the launcher's MPI started {size} ranks, mpi4py's MPI sees {world.size}: they are different "
            "MPIs; build mpi4py "
            "with the launcher's (pip install --no-binary mpi4py mpi4py)"
        )
    with socket.socket() as free:
        free.bind(("", 0))
        return world.bcast((socket.gethostname(), str(free.getsockname()[1])), root=0)


def _first_host(nodes: str) -> str:
    if not any(c in nodes for c in ",["):
        return nodes
    try:
        listing = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30, check=True
        )
    except (FileNotFoundError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"cannot expand the node list {nodes} ({error}): export MASTER_ADDR in the job script"
        ) from None
    return listing.stdout.split()[0]


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ConfigError(
            f"{name} is not set, although the launcher's other variables are: start with torchrun, srun or "
            "mpirun"
        )
    return environ[name]


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text} is not a number") from None
