"""Who may ask a run to stop, and what it becomes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import omnirl_hpc
from omnirl_hpc.launch.stop import EXIT_INTERRUPTED, StopFlag, StopReason, StopRequested
from tests.helpers import one_rank_group, run_ranks

NONE, REQUEUE, TERM, USER = StopReason
SLURM = {"SLURM_JOB_ID": "123", "SLURM_RESTART_COUNT": "2"}


@pytest.fixture
def flag(tmp_path):
    """A flag inside a Slurm job. Handlers are put back at the end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    flag = StopFlag(tmp_path, SLURM)
    flag.install()
    yield flag
    for number, handler in before.items():
        signal.signal(number, handler)


def test_nothing_is_no_reason(flag):
    assert flag.here(look_at_files=True) == NONE


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("STOP", USER),
        ("STOP.123.2", REQUEUE),
        ("STOP.123.1", NONE),  # of the run before the requeue
        ("STOP.124.2", NONE),  # another job's
        ("REQUEUE.123.2", NONE),
    ],
)
def test_files(flag, tmp_path, file, reason):
    (tmp_path / file).touch()
    assert flag.here(look_at_files=True) == reason
    assert flag.here(look_at_files=False) == NONE


def test_the_first_start_of_a_job_counts_as_restart_0(tmp_path):
    assert StopFlag(tmp_path, {"SLURM_JOB_ID": "123"}).system_file == tmp_path / "STOP.123.0"
    assert (
        StopFlag(tmp_path, {"SLURM_JOB_ID": "123", "SLURM_RESTART_COUNT": ""}).system_file
        == tmp_path / "STOP.123.0"
    )


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGUSR1, REQUEUE), (signal.SIGTERM, TERM), (signal.SIGINT, USER)]
)
def test_signals(flag, number, reason):
    os.kill(os.getpid(), number)
    assert flag.here(look_at_files=False) == reason
    if number != signal.SIGINT:
        os.kill(os.getpid(), number)  # in a container it can come twice
    assert flag.here(look_at_files=True) == reason


@pytest.mark.parametrize("order", [(signal.SIGUSR1, signal.SIGTERM), (signal.SIGTERM, signal.SIGUSR1)])
def test_a_signal_that_may_be_a_persons_counts_more_than_the_systems(flag, order):
    for number in order:
        os.kill(os.getpid(), number)
    assert flag.here(look_at_files=False) == TERM


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_file_of_a_person_counts_more_than_a_signal(flag, tmp_path, number):
    os.kill(os.getpid(), number)
    (tmp_path / "STOP").touch()
    assert flag.here(look_at_files=True) == USER


def test_a_point_in_time(tmp_path, monkeypatch):
    flag = StopFlag(tmp_path, SLURM, deadline=1000.0)
    monkeypatch.setattr(time, "time", lambda: 999.0)
    assert flag.here(look_at_files=True) == NONE
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert flag.here(look_at_files=True) == REQUEUE
    assert flag.here(look_at_files=False) == NONE  # one clock decides
    (tmp_path / "STOP").touch()
    assert flag.here(look_at_files=True) == USER


def test_rank_0_looks_at_files_and_every_rank_listens_to_signals(flag, tmp_path):
    with one_rank_group():
        flag.check(rank=0, device=torch.device("cpu"))  # nothing happens
        (tmp_path / "STOP").touch()
        flag.check(rank=1, device=torch.device("cpu"))
        with pytest.raises(StopRequested) as stop:
            flag.check(rank=0, device=torch.device("cpu"))
        assert stop.value.reason == USER
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(StopRequested) as stop:
            flag.check(rank=1, device=torch.device("cpu"))
        assert stop.value.reason == REQUEUE


def ask_on_two_ranks(folder: Path) -> list[str]:
    """What both ranks, each with a folder of its own, do after one of them alone has heard something."""
    rank = dist.get_rank()
    own = folder / f"rank_{rank}"
    own.mkdir()
    flag = StopFlag(own, SLURM)
    flag.install()
    said = []

    def check() -> None:
        try:
            flag.check(rank, "cpu")
            said.append("go on")
        except StopRequested as stop:
            said.append(stop.reason.name)

    check()
    if rank == 1:
        (own / "STOP").touch()  # a view of the folder that is not rank 0's, who alone looks
    check()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    check()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    check()
    if rank == 0:
        (own / "STOP").touch()
    check()
    return said


def test_all_ranks_stop_for_the_weightiest_reason_of_any(tmp_path):
    said = ["go on", "go on", "REQUEUE", "TERM", "USER"]
    assert run_ranks(2, ask_on_two_ranks, tmp_path) == [said, said]


@pytest.mark.parametrize(
    ("reason", "left"), [(NONE, set()), (USER, set()), (TERM, {"TERM.123.2"}), (REQUEUE, {"REQUEUE.123.2"})]
)
def test_the_request_is_consumed_and_the_batch_shell_is_told(flag, tmp_path, reason, left):
    (tmp_path / "STOP").touch()
    flag.acknowledge(reason)
    assert {path.name for path in tmp_path.iterdir()} == left


def test_without_slurm_there_is_nobody_to_requeue(tmp_path):
    StopFlag(tmp_path, {}).acknowledge(REQUEUE)
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import os, signal, sys
from omnirl_hpc.launch.stop import StopFlag
flag = StopFlag(sys.argv[1])
flag.install()
assert "torch" not in sys.modules
os.kill(os.getpid(), signal.SIGINT)
print("first", flag.here(look_at_files=False).name, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("another signal", flush=True)
os.kill(os.getpid(), signal.SIGINT)
print("not reached", flush=True)
"""


def test_the_second_interrupt_ends_at_once(tmp_path):
    environ = {"PYTHONPATH": str(Path(omnirl_hpc.__file__).parent.parent)}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environ)
    assert result.returncode == EXIT_INTERRUPTED == 130
    assert result.stdout.splitlines() == ["first USER", "another signal"]
    assert result.stderr == ""
