"""One run directory, one job. A second job on it is refused; the same Slurm job, requeued, takes over."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnirl_hpc.errors import ConfigError
from omnirl_hpc.launch.identity import Identity

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def job_name(identity: Identity, environ: Mapping[str, str] | None = None) -> str:
    """What all ranks of a job, and only they, have in common."""
    environ = os.environ if environ is None else environ
    if "SLURM_JOB_ID" in environ:
        return f"slurm job {environ['SLURM_JOB_ID']}"
    if identity.master_addr is not None:
        # torchrun's defaults are the same on every machine: a loopback address means this one
        address = socket.gethostname() if identity.master_addr in LOOPBACK else identity.master_addr
        return f"{identity.launcher} run {environ.get('TORCHELASTIC_RUN_ID', '')} {address}:{identity.master_port}"
    return f"process {os.getpid()} on {socket.gethostname()}"


def find_holder(run_dir: str | Path) -> dict[str, Any] | None:
    """The job that holds the directory and shows signs of life: `job`, `host`, `pid` and `age`, seconds since
    the last one.
    """
    path = Path(run_dir) / "lock.json"
    try:
        holder = json.loads(path.read_text())
        age = time.time() - path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return None if age > STALE_SECONDS or _is_dead_here(holder) else holder | {"age": age}


class RunLock:
    """The file `lock.json` with the job's name and a heartbeat (its modification time)."""

    def __init__(self, run_dir: str | Path, job: str) -> None:
        self._path = Path(run_dir) / "lock.json"
        self._job = job
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Raise ConfigError where another job that is alive holds the directory. Every rank may call it."""
        holder = find_holder(self._path.parent)
        if holder is None or holder["job"] == self._job:
            return
        raise ConfigError(
            f"run_dir={self._path.parent} is in use by {holder['job']} on {holder['host']} (process {holder['pid']}, last sign "
            f"of life {holder['age']:.0f} s ago): "
            "choose another run_dir, or wait until that job has ended"
        )

    def acquire(self) -> None:
        """Write the lock and keep it fresh until `release`. Rank 0 only, after `check`."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        claim = self._path.with_name(f"lock.{os.getpid()}.{socket.gethostname()}")
        claim.write_text(json.dumps({"job": self._job, "host": socket.gethostname(), "pid": os.getpid()}))
        claim.replace(self._path)
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._done.wait(HEARTBEAT_SECONDS):
            try:
                os.utime(self._path)
            except FileNotFoundError:
                return  # the run directory was deleted under a running job: its own error will come


def _is_dead_here(holder: Mapping[str, Any]) -> bool:
    """Whether the holder ran on this host and is gone: no need to wait for its heartbeat to grow stale."""
    if holder["host"] != socket.gethostname():
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _is_zombie(holder["pid"])


def _is_zombie(pid: int) -> bool:
    """Whether a process has ended, and only its parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:  # gone meanwhile, or hidden: then it is another user's, and alive as far as one can know
        return False
