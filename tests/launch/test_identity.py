"""Who am I, from the variables that launchers really set."""

from __future__ import annotations

import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from omnirl_hpc.errors import ConfigError
from omnirl_hpc.launch import identity
from omnirl_hpc.launch.identity import Identity, find_identity, slurm_port

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node7",
}
ALONE = Identity("alone", 0, 0, 1)


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


def test_torchrun():
    assert find_identity(TORCHRUN) == Identity("torchrun", 3, 1, 4, "node1", 29500)


def test_srun():
    assert find_identity(SRUN) == Identity("srun", 5, 1, 8, "node7", slurm_port(SRUN))
    given = SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    assert find_identity(given) == Identity("srun", 5, 1, 8, "head", 1234)
    assert find_identity(SRUN | {"MASTER_PORT": ""}).master_port == slurm_port(SRUN)


def test_alone():
    assert find_identity({}) == ALONE


def test_torchrun_inside_an_srun_step_wins():
    agent = {"SLURM_STEP_NUM_TASKS": "2", "GROUP_WORLD_SIZE": "2"}
    assert find_identity(SRUN | TORCHRUN | agent) == find_identity(TORCHRUN)


def test_the_batch_shell_of_a_job_is_one_process():
    batch_shell = {"SLURM_JOB_ID": "1234", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert find_identity(batch_shell) == ALONE


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_of_torchrun_is_missing(name):
    with pytest.raises(ConfigError, match=f"^{name} is not set"):
        find_identity(without(TORCHRUN, name))


@pytest.mark.parametrize(
    "name", ["SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"]
)
def test_a_variable_of_srun_is_missing(name):
    with pytest.raises(ConfigError, match=f"^{name} is not set"):
        find_identity(without(SRUN, name))


@pytest.mark.parametrize(
    ("environ", "name"),
    [(TORCHRUN, "RANK"), (TORCHRUN, "MASTER_PORT"), (SRUN, "SLURM_PROCID"), (SRUN, "MASTER_PORT")],
)
def test_what_is_no_number(environ, name):
    with pytest.raises(ConfigError, match=f"^{name}=two is not a number"):
        find_identity(environ | {name: "two"})


@pytest.mark.parametrize("rank", ["4", "-1"])
def test_a_rank_outside_the_world(rank):
    with pytest.raises(ConfigError, match=f"says rank {rank} of 4 ranks"):
        find_identity(TORCHRUN | {"RANK": rank})


def test_ports_differ_between_jobs_and_restarts_and_agree_within_a_job():
    assert find_identity(SRUN).master_port == find_identity(SRUN | {"SLURM_PROCID": "0"}).master_port
    ports = [
        slurm_port({"SLURM_JOB_ID": str(job), "SLURM_RESTART_COUNT": str(r)})
        for job in range(1000, 1010)
        for r in range(16)
    ]
    assert len(set(ports)) == len(ports)
    assert all(20000 <= port < 30000 for port in ports)


def test_the_first_host_of_a_list_comes_from_scontrol(monkeypatch):
    def scontrol(command, **_):
        assert command == ["scontrol", "show", "hostnames", "node[7-8]"]
        return subprocess.CompletedProcess(command, 0, stdout="node7\nnode8\n")

    monkeypatch.setattr(identity.subprocess, "run", scontrol)
    assert find_identity(SRUN | {"SLURM_STEP_NODELIST": "node[7-8]"}).master_addr == "node7"


def test_without_scontrol_the_cure_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot expand the node list node\[7-8\].*export MASTER_ADDR"):
        find_identity(SRUN | {"SLURM_STEP_NODELIST": "node[7-8]"})


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}
PALS = {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PALS_LOCAL_RANKID": "1"}
JOB = {"SLURM_JOB_ID": "1234", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node7"}
GIVEN = {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(("environ", "local_rank"), [(OPEN_MPI, 1), (MPICH, 0), (PALS, 1)])
def test_mpirun(environ, local_rank):
    assert find_identity(environ | GIVEN) == Identity("mpi", 2, local_rank, 4, "head", 1234)
    assert find_identity(environ | JOB) == Identity("mpi", 2, local_rank, 4, "node7", slurm_port(JOB))
    assert find_identity(environ | JOB | GIVEN) == Identity("mpi", 2, local_rank, 4, "head", 1234)


def test_mpirun_counts_more_than_the_step_that_started_its_daemons():
    daemon = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_NTASKS": "1",
    }
    assert find_identity(OPEN_MPI | JOB | daemon) == Identity("mpi", 2, 1, 4, "node7", slurm_port(JOB))


@pytest.mark.parametrize(
    "extra", [{"PMI_RANK": "5", "PMI_SIZE": "8"}, {"PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.1.0"}]
)
def test_srun_with_mpi_is_srun(extra):
    assert find_identity(SRUN | extra) == find_identity(SRUN)


def test_a_step_whose_tasks_are_each_a_run_of_their_own_is_refused():
    """`srun -n4 --mpi=none mpirun -n 1 python …`, with Open MPI and with MPICH."""
    step = SRUN | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_STEP_NUM_NODES": "2"}
    for names in identity.MPI_VARIABLES:
        alone = dict(zip(names, ("0", "1", "0")))
        with pytest.raises(
            ConfigError, match=rf"^MPI says 1 ranks \({names[1]}\), the Slurm step has 4 tasks"
        ):
            find_identity(step | alone | GIVEN)


def test_mpirun_in_every_task_of_a_step_is_refused_where_tasks_share_a_node():
    """`srun -n4 -N2 mpirun -n 4`: daemons would be one on each node."""
    step = SRUN | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_NUM_NODES": "2"}
    with pytest.raises(ConfigError, match="each task would be a run of its own"):
        find_identity(step | OPEN_MPI | GIVEN)


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_step_of_one_rank_and_one_of_daemons_run(tasks):
    step = SRUN | {
        "SLURM_STEP_NUM_TASKS": f"{tasks}",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": f"{tasks}",
    }
    assert find_identity(step | OPEN_MPI | GIVEN) == Identity("mpi", 2, 1, 4, "head", 1234)
    if tasks == 1:  # srun -n1 mpirun -n 1
        alone = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
        assert find_identity(step | alone).world_size == 1


@pytest.mark.parametrize(
    ("outer", "said"),
    [
        (SRUN | {"SLURM_STEP_NUM_TASKS": "2"}, r"srun has started 2 tasks \(SLURM_STEP_NUM_TASKS\)"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, r"mpirun has started 2 tasks \(OMPI_COMM_WORLD_SIZE\)"),
        ({"PMI_SIZE": "2"}, r"mpirun has started 2 tasks \(PMI_SIZE\)"),
    ],
)
def test_a_torchrun_in_each_task_is_refused_unless_they_are_one(outer, said):
    agents = TORCHRUN | {"GROUP_WORLD_SIZE": "1"}
    with pytest.raises(ConfigError, match=rf"^torchrun says 1 \(GROUP_WORLD_SIZE\), {said}: .*--nnodes=2"):
        find_identity(agents | outer)
    assert find_identity(agents | {"GROUP_WORLD_SIZE": "2"} | outer).world_size == 4
    assert find_identity(agents | {"GROUP_WORLD_SIZE": "3"} | outer).world_size == 4  # a step for each node
    by_hand = TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}
    with pytest.raises(ConfigError, match=r"^torchrun says 1 \(WORLD_SIZE\)"):
        find_identity(by_hand | outer)


def test_srun_and_pmix_contradict_each_other():
    with pytest.raises(ConfigError, match="^PMIX_RANK=0 and SLURM_PROCID=5 contradict each other"):
        find_identity(SRUN | {"PMIX_RANK": "0"})


def test_mpi_of_another_size_than_the_job_is_refused():
    single = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"}
    with pytest.raises(ConfigError, match=r"^MPI says 1 ranks \(PMI_SIZE\), the Slurm job has 4 tasks"):
        find_identity(single | JOB)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_LOCAL_RANK"])
def test_a_variable_of_mpi_is_missing(name):
    with pytest.raises(ConfigError, match=f"^{name} is not set"):
        find_identity(without(OPEN_MPI, name) | GIVEN)


class World:
    """As much of mpi4py's COMM_WORLD as is used."""

    def __init__(self, size: int) -> None:
        self.size = size

    def bcast(self, value: object, root: int) -> object:
        assert root == 0
        return value


def mpi4py(size: int) -> SimpleNamespace:
    return SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=World(size)))


def test_outside_of_slurm_mpi_itself_tells_the_address(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", mpi4py(4))
    found = find_identity(OPEN_MPI)
    assert found.master_addr == socket.gethostname() and 1024 <= found.master_port < 65536
    monkeypatch.setitem(sys.modules, "mpi4py", mpi4py(1))  # another MPI: n processes that are each alone
    with pytest.raises(ConfigError, match="started 4 ranks, mpi4py's MPI sees 1"):
        find_identity(OPEN_MPI)


def test_without_mpi4py_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match=r"export MASTER_ADDR and MASTER_PORT, or pip install '.\[mpi\]'"):
        find_identity(OPEN_MPI)
