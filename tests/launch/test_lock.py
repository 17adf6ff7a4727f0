"""One run directory, one writer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import omnirl_hpc
from omnirl_hpc.errors import ConfigError, LockLostError
from omnirl_hpc.launch import lock as lock_module
from omnirl_hpc.launch.identity import Identity
from omnirl_hpc.launch.lock import (
    SILENT_LOOKS,
    Holder,
    RunLock,
    describe_this_run,
    find_holder,
    is_alive,
    job_name,
    process_lives,
)

ROOT = Path(omnirl_hpc.__file__).parent.parent
ALONE = Identity("alone", 0, 0, 1)
TORCHRUN = {"TORCHELASTIC_RUN_ID": "abc"}
ELSEWHERE = {"host": "node9", "boot": "another", "namespace": "pid:[1]", "pid": 4711, "started": 1}


def srun(rank: int = 0) -> Identity:
    return Identity("srun", rank, rank, 2, "node1", 20007)


def slurm(job: int = 7, step: int | str = 0, restart: int = 0) -> dict[str, str]:
    return {"SLURM_JOB_ID": f"{job}", "SLURM_STEP_ID": f"{step}", "SLURM_RESTART_COUNT": f"{restart}"}


def write(folder: Path, holder: Holder, beats: int = 0) -> Path:
    """The lock of another run."""
    (folder / "lock").mkdir(exist_ok=True)
    file = folder / "lock" / f"{holder.token}.json"
    file.write_text(f"{json.dumps(asdict(holder))}\n{beats:020d}\n")
    return file


def beat(file: Path) -> None:
    file.write_text(file.read_text() + "1")


def elsewhere(environ: dict[str, str], identity: Identity | None = None) -> Holder:
    """A run on another machine."""
    return replace(describe_this_run(identity or srun(), environ), **ELSEWHERE)


class Patience:
    """Stands for `sleep`: time passes at once, and what others do meanwhile is done."""

    def __init__(self, *actions: Callable[[], object]) -> None:
        self.looks = 0
        self._actions = list(actions)

    def __call__(self, seconds: float) -> None:
        self.looks += 1
        if self._actions:
            self._actions.pop(0)()


@pytest.fixture
def held(tmp_path):
    lock = RunLock(tmp_path, ALONE, {})
    lock.acquire()
    yield lock
    lock.release()


# ---------------------------------------------------------------- who is refused


def test_another_run_on_this_machine_is_refused_at_once_and_by_name(held, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    for attempt in (RunLock.check, RunLock.acquire):
        with pytest.raises(ConfigError) as error:
            attempt(RunLock(tmp_path, ALONE, {}, sleep=Patience()))
        assert str(error.value) == (
            f"run_dir={tmp_path} is in use by process {os.getpid()} on {socket.gethostname()}: "
            "choose another run_dir, or wait until that run has ended"
        )
    assert sorted(tmp_path.rglob("*")) == before and held.is_held()  # nothing was taken or left


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "process 4711 on node9"),
        (slurm(), "slurm job 7, step 0 (process 4711 on node9)"),
        (slurm() | {"SLURM_CLUSTER_NAME": "hpc"}, "slurm job 7 of hpc, step 0 (process 4711 on node9)"),
        ({"SLURM_JOB_ID": "7"}, "slurm job 7 (process 4711 on node9)"),
    ],
)
def test_a_holder_is_named_once(environ, said):
    assert str(elsewhere(environ, ALONE)) == said


@pytest.mark.parametrize(
    "environ",
    [
        slurm(job=8),
        slurm(step=1),  # a second `srun --overlap` of the same job
        slurm(step=1, restart=2),  # another step, of the job after its requeue
        slurm(restart=1),  # the same step, started twice
        slurm(restart=0),  # an earlier start, on a node that Slurm had lost
        slurm(restart=2) | {"SLURM_CLUSTER_NAME": "another"},
    ],
)
def test_a_run_elsewhere_that_shows_life_is_never_replaced(tmp_path, environ):
    file = write(tmp_path, elsewhere(slurm(restart=1)))
    patience = Patience(lambda: None, lambda: beat(file))
    with pytest.raises(ConfigError, match="in use by slurm job 7, step 0"):
        RunLock(tmp_path, srun(), environ, patience).check()
    assert patience.looks == 2


def test_only_a_requeue_of_the_same_job_and_step_takes_over_at_once(tmp_path):
    old = elsewhere(slurm(restart=1))
    write(tmp_path, old)
    lock = RunLock(tmp_path, srun(), slurm(restart=2), sleep=Patience())
    lock.check()
    lock.acquire()
    assert find_holder(tmp_path).restart == 2 and lock._sleep.looks == 0
    lock.release()


def test_a_restart_count_means_nothing_outside_of_a_job(tmp_path):
    """Two processes that a requeued job's shell left its variable to."""
    write(tmp_path, elsewhere({}, ALONE))
    patience = Patience()
    RunLock(tmp_path, ALONE, {"SLURM_RESTART_COUNT": "1"}, sleep=patience).check()
    assert patience.looks == SILENT_LOOKS


def test_other_ranks_of_the_job_pass_whatever_their_step_says(tmp_path):
    """With mpirun, ranks on other nodes stand in the step of its daemons, and rank 0 in none."""
    file = write(tmp_path, elsewhere(slurm(step="")))
    mpirun = replace(srun(rank=1), launcher="mpi")
    RunLock(tmp_path, mpirun, slurm(step=3), sleep=Patience()).check()
    for identity, environ in ((mpirun, slurm(job=8)), (srun(rank=1), slurm(step=3))):
        with pytest.raises(ConfigError, match="in use by slurm job 7"):
            RunLock(tmp_path, identity, environ, sleep=Patience(lambda: beat(file))).check()


# ---------------------------------------------------------------- who is alive


@pytest.mark.parametrize("modified", [0.0, -3600.0, 3600.0])
def test_clocks_say_nothing(tmp_path, monkeypatch, modified):
    """The file system's, and this machine's, which jumps: a silent run is dead after so many looks, and one
    that moves is alive.
    """
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + modified)
    monkeypatch.setattr(time, "monotonic", lambda: 1e9 + modified)
    file = write(tmp_path, elsewhere(slurm()))
    os.utime(file, (now - modified, now - modified))
    silent = Patience()
    RunLock(tmp_path, srun(), slurm(job=8), silent).check()
    assert silent.looks == SILENT_LOOKS

    def beat_on_its_clock() -> None:
        beat(file)
        os.utime(file, (now - modified, now - modified))

    late = Patience(*[lambda: None] * (SILENT_LOOKS - 1), beat_on_its_clock)
    with pytest.raises(ConfigError, match="in use by slurm job 7"):
        RunLock(tmp_path, srun(), slurm(job=8), late).check()


def test_a_silent_lock_is_watched_once_and_then_taken(tmp_path, capsys):
    write(tmp_path, elsewhere(slurm()))
    lock = RunLock(tmp_path, srun(), slurm(job=8), Patience())
    lock.check()
    assert f"run_dir={tmp_path} is locked by slurm job 7, step 0" in capsys.readouterr().out
    lock.acquire()
    assert lock._sleep.looks == SILENT_LOOKS and find_holder(tmp_path).job == "slurm job 8"
    lock.release()


@pytest.mark.parametrize("when", ["after check", "while it acquires"])
def test_who_came_in_between_is_not_replaced(tmp_path, monkeypatch, when):
    """A silent lock was found dead; before it is freed, another run does that and takes it."""
    write(tmp_path, elsewhere(slurm()))
    slow = RunLock(tmp_path, srun(), slurm(job=8), Patience())
    slow.check()
    quick = RunLock(tmp_path, ALONE, {}, Patience())
    if when == "after check":
        quick.acquire()
    else:
        find = slow._find_replaceable

        def find_and_dawdle() -> Holder | None:
            found = find()
            quick.acquire()
            return found

        monkeypatch.setattr(slow, "_find_replaceable", find_and_dawdle)
        monkeypatch.setattr(quick, "acquire", lambda acquire=quick.acquire: quick.is_held() or acquire())
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on"):
        slow.acquire()
    assert quick.is_held()
    quick.release()


def test_a_process_that_has_ended_is_known_at_once(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    me = describe_this_run(ALONE, {})
    holder = replace(me, pid=ended.pid, started=lock_module._process_status(ended.pid)[1])
    assert process_lives(holder) is True
    ended.stdin.close()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert process_lives(holder) is False  # its parent has not asked how it ended
    ended.wait()
    assert process_lives(holder) is False
    write(tmp_path, holder)
    lock = RunLock(tmp_path, ALONE, {}, sleep=Patience())
    lock.check()
    lock.acquire()
    lock.release()
    assert lock._sleep.looks == 0


@pytest.mark.parametrize(
    "other",
    [
        {"boot": "the boot before"},
        {"namespace": "pid:[1]"},
        {"host": "node9"},
        {"started": 1},  # a later process with this number
        {"boot": "", "namespace": ""},  # not on Linux
    ],
)
def test_a_process_elsewhere_says_nothing(other):
    me = describe_this_run(ALONE, {})
    assert process_lives(me) is True
    assert process_lives(replace(me, **other)) is None
    if "started" not in other:
        assert process_lives(replace(me, pid=2**22 + 1, **other)) is None  # no such process here


def test_the_process_of_another_user_may_be_another(monkeypatch):
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    me = describe_this_run(ALONE, {})
    monkeypatch.setattr(os, "kill", refuse)
    assert process_lives(me) is None


def test_half_a_lock_is_watched_as_any_other(tmp_path):
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock" / "abc.json").write_text('{"job": "jo')
    patience = Patience()
    lock = RunLock(tmp_path, ALONE, {}, patience)
    lock.acquire()
    assert patience.looks == SILENT_LOOKS and os.listdir(tmp_path / "lock") == [f"{lock.token}.json"]
    lock.release()


def test_what_is_no_lock_is_left_alone(tmp_path):
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock" / "notes.txt").touch()
    with pytest.raises(
        ConfigError, match=f"^{tmp_path}/lock has files in it that are no lock of a run: delete it$"
    ):
        RunLock(tmp_path, ALONE, {}, Patience()).acquire()
    assert os.listdir(tmp_path) == ["lock"] and os.listdir(tmp_path / "lock") == ["notes.txt"]


def test_a_folder_left_empty_is_free(tmp_path):
    """A run was killed between the two parts of `release`."""
    (tmp_path / "lock").mkdir()
    lock = RunLock(tmp_path, ALONE, {}, Patience())
    lock.acquire()
    assert lock._sleep.looks == 0
    lock.release()


def test_a_path_that_is_a_file_is_held_by_nobody(tmp_path):
    (tmp_path / "file").touch()
    assert find_holder(tmp_path / "file") is None  # RunDirectory.create says what is wrong with it


def test_a_place_that_refuses_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match=f"^run_dir={tmp_path}/gone cannot be locked: .*No such file"):
        RunLock(tmp_path / "gone", ALONE, {}).acquire()


# ---------------------------------------------------------------- holding it


def test_released_is_free(tmp_path):
    lock = RunLock(tmp_path, ALONE, {})
    lock.acquire()
    assert find_holder(tmp_path).token == lock.token
    lock.release()
    assert list(tmp_path.iterdir()) == []
    RunLock(tmp_path, ALONE, {}).check()


def test_the_counter_moves_and_the_rest_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.01)
    lock = RunLock(tmp_path, ALONE, {})
    lock.acquire()
    holder = find_holder(tmp_path)
    seen = replace(holder, host="node9")  # as it is seen from another machine
    assert is_alive(tmp_path, seen, looks=3000, sleep=lambda seconds: time.sleep(0.01))
    assert find_holder(tmp_path) == holder
    lock.release()
    assert not is_alive(tmp_path, seen)


def test_who_was_replaced_stops_writing_and_touches_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.01)
    lock = RunLock(tmp_path, ALONE, {})
    lock.acquire()
    lock.require()
    other_rank = RunLock(tmp_path, srun(rank=1), {})
    other_rank.require()  # it may log before it has met rank 0
    other_rank.token = lock.token
    other_rank.require()
    next((tmp_path / "lock").iterdir()).unlink()  # as `acquire` of a run that has found it silent
    new = replace(elsewhere(slurm(job=8)), token="new")
    file = write(tmp_path, new)
    said = rf"^run_dir={tmp_path} was taken over by slurm job 8, step 0 \(process 4711 on node9\): .*ends"
    for rank in (lock, other_rank):
        with pytest.raises(LockLostError, match=said):
            rank.require()
        assert not rank.is_held()
    before = file.read_bytes()
    lock._thread.join(timeout=60)
    assert not lock._thread.is_alive()
    lock.release()
    other_rank.release()
    assert os.listdir(tmp_path / "lock") == ["new.json"] and file.read_bytes() == before


def test_a_folder_deleted_under_a_running_job_does_not_end_its_heartbeat_in_noise(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.01)
    lock = RunLock(tmp_path / "run", ALONE, {})
    (tmp_path / "run").mkdir()
    lock.acquire()
    subprocess.run(["rm", "-r", tmp_path / "run"], check=True)
    lock._thread.join(timeout=60)
    assert not lock._thread.is_alive()
    with pytest.raises(LockLostError, match=f"^run_dir={tmp_path}/run is not locked any more: "):
        lock.require()
    lock.release()


def test_a_rank_that_never_held_it_releases_nothing(held, tmp_path):
    RunLock(tmp_path, srun(rank=1), {}).release()
    assert held.is_held()


# ---------------------------------------------------------------- real processes

# Sixteen processes, released by a pipe, all want the directory at once: one gets it, and the others are
# refused while it lives.
CROWD = """
import os, sys
from pathlib import Path
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.launch.identity import Identity
from omnirl_hpc.launch.lock import RunLock
assert "torch" not in sys.modules
folder = Path(sys.argv[1])
for round in range(int(sys.argv[2])):
    start, go = os.pipe()
    asked, answer = os.pipe()
    over, end = os.pipe()
    children = []
    for child in range(16):
        if (pid := os.fork()) == 0:
            lock = RunLock(folder, Identity("alone", 0, 0, 1), {})
            os.read(start, 1)
            try:
                lock.check()
                lock.acquire()
            except ConfigError as error:
                os.write(answer, b"r" if "is in use by process" in str(error) else b"?")
                os._exit(0)
            os.write(answer, b"w")
            os.read(over, 1)    # holds it until all others have been refused
            if round % 3 == 0:
                lock.release()  # else it dies and leaves its lock: the next round must free that first
            os._exit(0)
        children.append(pid)
    os.write(go, b"s" * 16)
    answers = b"".join(os.read(asked, 1) for _ in children).decode()
    os.write(end, b"e")
    for pid in children:
        os.waitpid(pid, 0)
    for pipe in (start, go, asked, answer, over, end):
        os.close(pipe)
    print("".join(sorted(answers)), flush=True)
"""


def run_python(program: str, *arguments: object, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-c", program, *map(str, arguments)]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def test_of_many_that_start_at_once_one_gets_it(tmp_path):
    rounds = 25
    crowd = run_python(CROWD, tmp_path, rounds)
    said, _ = crowd.communicate(timeout=120)
    assert said.split() == ["r" * 15 + "w"] * rounds
    assert [path.name for path in tmp_path.iterdir()] in ([], ["lock"])


HOLD = """
import sys
from omnirl_hpc.launch import lock
from omnirl_hpc.launch.identity import Identity
lock.HEARTBEAT_SECONDS = 0.02
mine = lock.RunLock(sys.argv[1], Identity("alone", 0, 0, 1), {})
mine.acquire()
print(mine.token, flush=True)
input()
"""


def test_another_pid_namespace_is_another_machine(tmp_path):
    """As in a container that isolates processes: there the holder has a number that means nothing here."""
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    isolated = ("unshare", *user, "--pid", "--fork", "--kill-child", "--mount-proc")
    quickly = lambda seconds: time.sleep(0.02)  # noqa: E731
    with run_python(HOLD, tmp_path, before=isolated) as holder:
        token = holder.stdout.readline().strip()
        try:
            seen = find_holder(tmp_path)
            assert seen.token == token and seen.pid < 10 and seen.host == socket.gethostname()
            assert process_lives(seen) is None
            with pytest.raises(ConfigError, match="in use by process"):
                RunLock(tmp_path, ALONE, {}, quickly).acquire()
        finally:
            holder.send_signal(signal.SIGKILL)
    after = RunLock(tmp_path, ALONE, {}, quickly)
    after.acquire()  # it is silent now
    assert find_holder(tmp_path).token == after.token
    after.release()


# ---------------------------------------------------------------- names


def test_names_of_jobs():
    torchrun = Identity("torchrun", 1, 1, 2, "node1", 29500)
    assert job_name(torchrun, TORCHRUN) == "torchrun run abc node1:29500"
    assert job_name(torchrun, TORCHRUN | {"SLURM_JOB_ID": "7"}) == "slurm job 7"
    assert job_name(srun(1), {"SLURM_JOB_ID": "7"}) == "slurm job 7"
    assert job_name(ALONE, {}) == ""


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1"])
def test_the_defaults_of_torchrun_on_two_machines_are_two_jobs(address):
    name = job_name(Identity("torchrun", 0, 0, 2, address, 29500), {"TORCHELASTIC_RUN_ID": "none"})
    assert name == f"torchrun run none {socket.gethostname()}:29500"
