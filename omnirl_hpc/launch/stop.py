"""Asking a run to stop, and agreeing on it.

Sources of one flag: a file STOP in the run directory (a person), a file STOP.<job>.<restart> (the batch
shell, before a time limit or a preemption), a point in time (`stop_before`), the signals USR1, TERM and INT
to any rank. TERM comes from a person or from Slurm, at the start of a preemption: only the batch shell can
ask. The ranks agree on the flag at every micro-batch, so all stop at the same place. Torch is imported only
there: handlers must be in place before its import, which takes seconds.
"""

from __future__ import annotations

import enum
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from omnirl_hpc.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    import torch


class StopReason(enum.IntEnum):
    """Why to stop. The larger one wins where ranks have different reasons."""

    NONE = 0
    REQUEUE = 1  # the system wants the nodes back: save, end, run again
    TERM = 2  # somebody wants the run to end: save and end; run again if Slurm says that it was the system
    USER = 3  # a person wants the run to end: save and end


SIGNALS = {
    signal.SIGUSR1: StopReason.REQUEUE,
    signal.SIGTERM: StopReason.TERM,
    signal.SIGINT: StopReason.USER,
}


class StopRequested(Exception):
    """Raised on all ranks at the same place. The partial step is to be given up."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.name)
        self.reason = reason


class StopFlag:
    """This rank's view of whether to stop."""

    def __init__(
        self, run_dir: str | Path, environ: Mapping[str, str] | None = None, deadline: float | None = None
    ) -> None:
        """`deadline`: seconds since the epoch at which the system wants the nodes back."""
        environ = os.environ if environ is None else environ
        self.user_file = Path(run_dir) / "STOP"
        self.system_file = None
        self._markers: dict[StopReason, Path] = {}  # what the batch shell is told
        if job := environ.get("SLURM_JOB_ID"):
            suffix = f"{job}.{environ.get('SLURM_RESTART_COUNT') or 0}"
            self.system_file = Path(run_dir) / f"STOP.{suffix}"
            self._markers = {
                why: Path(run_dir) / f"{why.name}.{suffix}" for why in (StopReason.REQUEUE, StopReason.TERM)
            }
        self._deadline = deadline
        self._signalled = StopReason.NONE
        self._interrupts = 0

    def install(self) -> None:
        """Catch signals. In a container a signal can come twice, so only a second Ctrl-C means more than the
        first.
        """
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                os._exit(EXIT_INTERRUPTED)
        self._signalled = max(self._signalled, SIGNALS[signal.Signals(number)])

    def here(self, look_at_files: bool) -> StopReason:
        """This rank's own reason. Clocks of nodes differ: who looks at files also looks at the clock."""
        reason = self._signalled
        if look_at_files:
            if self._deadline is not None and time.time() >= self._deadline:
                reason = max(reason, StopReason.REQUEUE)
            if self.system_file is not None and self.system_file.exists():
                reason = max(reason, StopReason.REQUEUE)
            if self.user_file.exists():
                reason = max(reason, StopReason.USER)
        return reason

    def check(self, rank: int, device: torch.device | str) -> None:
        """Collective. Raises StopRequested on every rank where any rank has a reason. Only rank 0 looks at
        files.
        """
        import torch
        import torch.distributed as dist

        flag = torch.tensor(int(self.here(look_at_files=rank == 0)), device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if reason := StopReason(int(flag)):
            raise StopRequested(reason)

    def acknowledge(self, reason: StopReason) -> None:
        """After everything is saved, on rank 0: consume the user's file, or leave the batch shell a file
        REQUEUE or TERM.
        """
        self.user_file.unlink(missing_ok=True)
        if reason in self._markers:
            self._markers[reason].touch()
