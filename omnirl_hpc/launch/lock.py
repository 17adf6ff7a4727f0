"""One run directory, one writer.

    RUN/lock/TOKEN.json    the run that holds RUN: a line of JSON, and a counter that moves while it lives

To take the lock, a run makes a folder with its file under another name and renames it to RUN/lock. The
system refuses that as long as RUN/lock has a file in it, so that of any number of runs one succeeds. A
lock whose holder is dead is freed by deleting that holder's file by its name, the token, which is different
for each start: nobody can delete the lock of a run that came in between. Both hold on any file system on
which renaming is atomic: local ones, NFS, Lustre, GPFS (docs/slurm.md says what else they promise).

Whether a holder lives is judged by watching the counter, without a clock: clocks of two machines are never
compared. Its process is asked for only where that is the same process here: on the same machine since the
same boot, in the same PID namespace.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from omnirl_hpc.errors import ConfigError, LockLostError
from omnirl_hpc.launch.identity import Identity, slurm_job, slurm_restart

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
LOOK_SECONDS = 1.0  # between two looks at a counter
# Looks at an unmoved counter after which its run is taken for dead. Longer than the 60 s for which an NFS
# client may answer from its cache, and than an import from a slow disk, which stops all threads of Python.
SILENT_LOOKS = 90
QUICK_LOOKS = 10  # the same for who only wants to know
LOCK = "lock"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Holder:
    """A run, as its lock describes it."""

    token: str  # random, new for each start
    job: str  # what all ranks of the job, and only they, have in common; empty for a process that runs alone
    step: str = ""  # of a Slurm job
    restart: int = 0  # how often Slurm has requeued the job
    host: str = ""
    boot: str = ""  # identifies the boot of the machine; empty where processes cannot be compared
    namespace: str = ""  # the PID namespace that `pid` belongs to
    pid: int = 0
    started: int = 0  # when the process was started, in clock ticks since boot

    def __str__(self) -> str:
        step = f", step {self.step}" if self.step else ""
        process = f"process {self.pid} on {self.host}"
        return f"{self.job}{step} ({process})" if self.job else process

    def was_requeued_as(self, other: Holder) -> bool:
        """Whether Slurm has ended this run and started it again as `other`."""
        return (self.job, self.step) == (other.job, other.step) and self.restart < other.restart


def job_name(identity: Identity, environ: Mapping[str, str]) -> str:
    """What all ranks of a job, and only they, have in common; empty for a process that runs alone."""
    if job := slurm_job(environ):
        return job
    if identity.master_addr is None:
        return ""
    # torchrun's defaults are the same on every machine: a loopback address means this one
    address = socket.gethostname() if identity.master_addr in LOOPBACK else identity.master_addr
    return (
        f"{identity.launcher} run {environ.get('TORCHELASTIC_RUN_ID', '')} {address}:{identity.master_port}"
    )


def describe_this_run(identity: Identity, environ: Mapping[str, str]) -> Holder:
    boot, namespace = _machine()
    slurm = environ if slurm_job(environ) else {}
    return Holder(
        token=secrets.token_hex(8),
        job=job_name(identity, environ),
        step=slurm.get("SLURM_STEP_ID", ""),
        restart=slurm_restart(slurm),
        host=socket.gethostname(),
        boot=boot,
        namespace=namespace,
        pid=os.getpid(),
        started=_process_status(os.getpid())[1] if boot else 0,
    )


def find_holder(run_dir: str | Path) -> Holder | None:
    """The run that holds a directory, alive or not; None where there is none."""
    folder = Path(run_dir) / LOCK
    with suppress(FileNotFoundError, NotADirectoryError):  # free, or released just now
        for file in map(folder.joinpath, os.listdir(folder)):
            if file.suffix == ".json":
                return _parse(file.stem, file.read_bytes())
    return None


def is_alive(
    run_dir: str | Path,
    holder: Holder,
    looks: int = QUICK_LOOKS,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether a holder shows signs of life. Takes `looks` seconds where only its silence can tell."""
    known = process_lives(holder)
    if known is not None:
        return known
    file = Path(run_dir) / LOCK / f"{holder.token}.json"
    try:
        first = file.read_bytes()
        for _ in range(looks):
            sleep(LOOK_SECONDS)
            if file.read_bytes() != first:
                return True
    except FileNotFoundError:  # it has ended, or another run has found it dead
        pass
    return False


class RunLock:
    """The lock of this job on a run directory. Rank 0 holds it, the other ranks know its token."""

    def __init__(
        self,
        run_dir: str | Path,
        identity: Identity,
        environ: Mapping[str, str] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run_dir = Path(run_dir)
        self._identity = identity
        self._me = describe_this_run(identity, os.environ if environ is None else environ)
        self._sleep = sleep
        self._dead: set[str] = set()  # tokens
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        # Of rank 0. Other ranks are told it when they have met; what they write before is their log.
        self.token = self._me.token if identity.rank == 0 else None

    def check(self) -> None:
        """Raise ConfigError where another run that is alive holds the directory. Every rank may call it; it
        changes nothing.
        """
        self._find_replaceable()

    def _find_replaceable(self) -> Holder | None:
        """The holder that this run may replace: a dead one, or the job before its requeue. None where there
        is none.
        """
        while (holder := find_holder(self._run_dir)) is not None and not self._may_replace(holder):
            if self._identity.rank == 0 and process_lives(holder) is None:
                print(
                    f"run_dir={self._run_dir} is locked by {holder}: watching whether it is alive", flush=True
                )
            if is_alive(self._run_dir, holder, SILENT_LOOKS, self._sleep):
                raise ConfigError(
                    f"run_dir={self._run_dir} is in use by {holder}: "
                    "choose another run_dir, or wait until that run has ended"
                )
            self._dead.add(holder.token)
        return holder

    def _may_replace(self, holder: Holder) -> bool:
        if self._identity.rank:  # rank 0 judges other starts of the job, and its steps where ranks share none
            same_step = holder.step == self._me.step or self._identity.launcher != "srun"
            return holder.job == self._me.job and same_step
        return holder.token in self._dead or holder.was_requeued_as(self._me)

    def acquire(self) -> None:
        """Take the lock and keep its counter moving until `release`. Rank 0 only.

        Raises ConfigError where another run that is alive holds it, and where the file system refuses.
        """
        try:
            for _ in range(SILENT_LOOKS):
                if self._claim():
                    break
                if (replaceable := self._find_replaceable()) is not None:
                    self._file(replaceable.token).unlink(missing_ok=True)
                else:
                    self._sleep(LOOK_SECONDS)  # until what a reader had open is gone (NFS keeps it)
            else:
                raise ConfigError(
                    f"{self._run_dir / LOCK} has files in it that are no lock of a run: delete it"
                )
        except OSError as error:
            raise ConfigError(f"run_dir={self._run_dir} cannot be locked: {error}") from None
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()

    def _claim(self) -> bool:
        """Whether this run has the lock now."""
        token = self._me.token
        folder = self._run_dir / f"{LOCK}.{token}"
        try:
            folder.mkdir()
            (folder / self._file(token).name).write_bytes(self._content(0))
            folder.rename(self._run_dir / LOCK)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            if not self.is_held():  # an NFS client that asks twice is told that there is nothing to rename
                raise
        return True

    def require(self) -> None:
        """Raise LockLostError where this job holds the directory no longer. To be called before each write.

        OSError where the file system does not answer.
        """
        if not self.is_held():
            holder = find_holder(self._run_dir)
            what = "is not locked any more" if holder is None else f"was taken over by {holder}"
            raise LockLostError(
                f"run_dir={self._run_dir} {what}: this run was silent for too long, "
                "or somebody deleted its lock; it ends, and writes nothing more there"
            )

    def is_held(self) -> bool:
        """Whether the lock is this job's, as far as this rank has been told its token."""
        if self.token is None:
            return True
        try:
            self._file(self.token).open("rb").close()  # not stat: an NFS client answers that from its cache
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def release(self) -> None:
        """Does nothing where `acquire` was not called, and takes nothing from who took over."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._file(self._me.token).unlink(missing_ok=True)
            with suppress(OSError):  # not empty: the next run has it
                (self._run_dir / LOCK).rmdir()

    def _beat(self) -> None:
        beats = 0
        while not self._done.wait(HEARTBEAT_SECONDS):
            beats += 1
            try:
                with self._file(self._me.token).open("r+b") as file:  # never makes it again
                    file.write(self._content(beats))
            except FileNotFoundError:
                return  # taken over, or the folder was deleted: the next write finds it (`require`)
            except OSError as error:
                log.warning("the lock of %s cannot be refreshed: %s", self._run_dir, error.strerror)

    def _file(self, token: str) -> Path:
        return self._run_dir / LOCK / f"{token}.json"

    def _content(self, beats: int) -> bytes:
        """Always as long, since it is written over."""
        return f"{json.dumps(asdict(self._me))}\n{beats:020d}\n".encode()


def _parse(token: str, content: bytes) -> Holder:
    try:
        return Holder(**json.loads(content.splitlines()[0]))
    except (IndexError, ValueError, TypeError):  # a machine that lost its power; only the counter can tell
        return Holder(token, "a run whose lock cannot be read")


def process_lives(holder: Holder) -> bool | None:
    """Whether the holder's process lives; None where that cannot be known here."""
    if not holder.boot or (holder.host, holder.boot, holder.namespace) != (socket.gethostname(), *_machine()):
        return None
    try:
        os.kill(holder.pid, 0)
        state, started = _process_status(holder.pid)
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:  # another user's: the holder, or a later process with its number
        return None
    if state in "ZX":  # it has ended, and its parent has not looked yet
        return False
    return True if started == holder.started else None


def _machine() -> tuple[str, str]:
    """This boot of this machine, and this PID namespace; empty where /proc does not show this namespace."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return "", ""
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux, or hidden
        return "", ""


def _process_status(pid: int) -> tuple[str, int]:
    """State and start time, in clock ticks since boot (proc(5), fields 3 and 22 of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
