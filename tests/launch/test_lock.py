"""One run directory, one job."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from omnirl_hpc.errors import ConfigError
from omnirl_hpc.launch import lock as lock_module
from omnirl_hpc.launch.identity import Identity
from omnirl_hpc.launch.lock import STALE_SECONDS, RunLock, job_name

TORCHRUN = {"TORCHELASTIC_RUN_ID": "abc"}


def hold(folder, job: str, host: str, pid: int, age: float = 0.0) -> None:
    """The lock of another job."""
    file = folder / "lock.json"
    file.write_text(json.dumps({"job": job, "host": host, "pid": pid}))
    os.utime(file, (time.time() - age, time.time() - age))


@pytest.fixture
def held(tmp_path):
    lock = RunLock(tmp_path, "job a")
    lock.check()
    lock.acquire()
    yield tmp_path / "lock.json"
    lock.release()


def test_another_job_is_refused_by_name(held):
    with pytest.raises(ConfigError) as error:
        RunLock(held.parent, "job b").check()
    message = str(error.value)
    assert message.startswith(
        f"run_dir={held.parent} is in use by job a on {socket.gethostname()} (process {os.getpid()}, last sign of life "
    )
    assert message.endswith("choose another run_dir, or wait until that job has ended")
    assert json.loads(held.read_text())["job"] == "job a"  # nothing was taken


def test_the_same_job_is_welcome_on_every_rank_and_after_a_requeue(held):
    RunLock(held.parent, "job a").check()
    again = RunLock(held.parent, "job a")
    again.acquire()
    assert json.loads(held.read_text()) == {"job": "job a", "host": socket.gethostname(), "pid": os.getpid()}
    again.release()


def test_a_path_that_is_a_file_is_held_by_nobody(tmp_path):
    (tmp_path / "file").touch()
    assert (
        lock_module.find_holder(tmp_path / "file") is None
    )  # RunDirectory.create says what is wrong with it


def test_released_is_free(tmp_path):
    lock = RunLock(tmp_path / "new", "job a")
    lock.acquire()
    lock.release()
    assert list((tmp_path / "new").iterdir()) == []
    RunLock(tmp_path / "new", "job b").check()


def test_a_rank_that_never_held_it_releases_nothing(held):
    RunLock(held.parent, "job a").release()
    assert held.exists()


def test_a_holder_on_another_machine_is_believed_until_its_heartbeat_is_old(tmp_path):
    lock = RunLock(tmp_path, "job b")
    hold(tmp_path, "job a", "node9", os.getpid(), age=STALE_SECONDS / 2)
    with pytest.raises(
        ConfigError, match=r"in use by job a on node9 \(process \d+, last sign of life 3\d s ago"
    ):
        lock.check()
    hold(tmp_path, "job a", "node9", os.getpid(), age=2 * STALE_SECONDS)
    lock.check()


def test_a_holder_on_this_machine_that_is_dead_does_not_count(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    hold(tmp_path, "job a", socket.gethostname(), ended.pid)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # its parent has not asked how it ended
    RunLock(tmp_path, "job b").check()
    ended.wait()
    RunLock(tmp_path, "job b").check()
    hold(tmp_path, "job a", socket.gethostname(), os.getppid())  # this one lives
    with pytest.raises(ConfigError, match="in use by job a"):
        RunLock(tmp_path, "job b").check()


def test_half_a_lock_holds_nothing(tmp_path):
    (tmp_path / "lock.json").write_text('{"job": "jo')
    RunLock(tmp_path, "job b").check()


def test_the_heartbeat_keeps_it_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.01)
    lock = RunLock(tmp_path, "job a")
    lock.acquire()
    os.utime(tmp_path / "lock.json", (0, 0))
    deadline = time.monotonic() + 60
    while (tmp_path / "lock.json").stat().st_mtime < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (tmp_path / "lock.json").stat().st_mtime > time.time() - 3600
    lock.release()


def test_a_folder_deleted_under_a_running_job_does_not_end_its_heartbeat_in_noise(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.01)
    lock = RunLock(tmp_path, "job a")
    lock.acquire()
    (tmp_path / "lock.json").unlink()
    lock._thread.join(timeout=60)
    assert not lock._thread.is_alive()
    lock.release()


def test_names_of_jobs():
    torchrun = Identity("torchrun", 1, 1, 2, "node1", 29500)
    assert job_name(torchrun, TORCHRUN) == "torchrun run abc node1:29500"
    assert job_name(torchrun, TORCHRUN | {"SLURM_JOB_ID": "7"}) == "slurm job 7"
    assert job_name(Identity("srun", 1, 1, 2, "node1", 20007), {"SLURM_JOB_ID": "7"}) == "slurm job 7"
    assert job_name(Identity("alone", 0, 0, 1), {}) == f"process {os.getpid()} on {socket.gethostname()}"


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1"])
def test_the_defaults_of_torchrun_on_two_machines_are_two_jobs(address):
    name = job_name(Identity("torchrun", 0, 0, 2, address, 29500), {"TORCHELASTIC_RUN_ID": "none"})
    assert name == f"torchrun run none {socket.gethostname()}:29500"
