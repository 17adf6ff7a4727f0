"""Who am I, from the variables that launchers really set."""

from __future__ import annotations

import subprocess

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
    assert find_identity(SRUN | TORCHRUN).launcher == "torchrun"


def test_the_batch_shell_of_a_job_is_one_process():
    batch_shell = {"SLURM_JOB_ID": "1234", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert find_identity(batch_shell) == ALONE


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_of_torchrun_is_missing(name):
    with pytest.raises(ConfigError, match=f"^{name} is not set"):
        find_identity(without(TORCHRUN, name))


@pytest.mark.parametrize("name", ["SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"])
def test_a_variable_of_srun_is_missing(name):
    with pytest.raises(ConfigError, match=f"^{name} is not set"):
        find_identity(without(SRUN, name))


@pytest.mark.parametrize(
    ("environ", "name"), [(TORCHRUN, "RANK"), (TORCHRUN, "MASTER_PORT"), (SRUN, "SLURM_PROCID"), (SRUN, "MASTER_PORT")]
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
        slurm_port({"SLURM_JOB_ID": str(job), "SLURM_RESTART_COUNT": str(r)}) for job in range(1000, 1010) for r in range(16)
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
    with pytest.raises(ConfigError, match=r"cannot expand SLURM_STEP_NODELIST=node\[7-8\].*export MASTER_ADDR"):
        find_identity(SRUN | {"SLURM_STEP_NODELIST": "node[7-8]"})
