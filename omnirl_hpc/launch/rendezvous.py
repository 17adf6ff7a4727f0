"""Where the ranks of a job meet before there is a process group: a key-value store, with deadlines that name
who is missing.

Two jobs can be given one address. The store belongs to the job whose rank 0 comes first; a rank of another
one is told so before it writes anything, and does not disturb the owner. So is a second process that takes
itself for the same rank.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from omnirl_hpc.errors import ConfigError, LaunchError
from omnirl_hpc.launch.identity import Identity, slurm_job, slurm_restart

GRACE_SECONDS = 10.0  # that other ranks wait longer than rank 0, which alone can say who is missing
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.01, 0.25  # between two questions to the store


class Rendezvous:
    """All ranks construct it, and call its methods in the same order.

    purpose: what only the ranks of this job do, such as training in a certain folder. Raises LaunchError
    where a rank does not do as the others, and ConfigError where the address is another job's or program's.
    """

    def __init__(
        self,
        identity: Identity,
        timeout_seconds: float,
        purpose: str,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        self.identity, self.seconds = identity, timeout_seconds
        address, port = identity.master_addr, identity.master_port
        if address is None or port is None:
            store: dist.Store = dist.HashStore()
        else:
            store = self._connect(address, port, environ)
        # torchrun keeps its store when it starts the ranks again: what the earlier ones wrote must not count
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store: dist.Store = dist.PrefixStore(f"omnirl_hpc/{attempt}", store)
        self._require_own_store(_describe_job(identity, environ, purpose))
        self._claim_rank()
        self.gather("host", socket.gethostname())
        self.share("all are here", "")

    def _require_own_store(self, job: str) -> None:
        if self.identity.rank == 0:
            owner = self.store.compare_set("job", "", job).decode()
        elif self._wait(["job"], self.seconds + GRACE_SECONDS):
            owner = self.store.get("job").decode()
        else:
            raise LaunchError(f"{self.identity}: rank 0 does not go on; its own message says why")
        if owner != job:
            raise ConfigError(
                f"the ranks at {self.identity.master_addr}:{self.identity.master_port} are those of another "
                f"job: {owner}; this is "
                f"{job}: set another MASTER_PORT"
            )

    def _claim_rank(self) -> None:
        me = f"process {os.getpid()} on {socket.gethostname()}, {secrets.token_hex(4)}"
        first = self.store.compare_set(f"claim/{self.identity.rank}", "", me).decode()
        if first != me:
            raise ConfigError(
                f"there are two ranks {self.identity.rank} of {self.identity.world_size}: the other is "
                f"{first.rpartition(',')[0]}; the job is started twice, or its launcher numbers ranks wrongly"
            )

    def gather(self, what: str, value: str) -> list[str]:
        """What every rank gives, by rank, on rank 0; nothing elsewhere."""
        self.store.set(f"{what}/{self.identity.rank}", value)
        if self.identity.rank:
            return []
        keys = [f"{what}/{rank}" for rank in range(self.identity.world_size)]
        if not self._wait(keys, self.seconds):
            there = [self.store.check([key]) for key in keys]
            missing = [rank for rank, here in enumerate(there) if not here]
            hosts = {self.store.get(f"host/{rank}").decode() for rank, here in enumerate(there) if here}
            raise LaunchError(
                f"rank(s) {numbers(missing)} of {self.identity.world_size} did not arrive within "
                f"{self.seconds:.0f} s; the "
                f"others are on {', '.join(sorted(hosts))}: look for what the missing ranks said, and "
                "whether their node reaches "
                f"{self.identity.master_addr}:{self.identity.master_port} (timeout_seconds=… to wait longer)"
            )
        return [self.store.get(key).decode() for key in keys]

    def share(self, what: str, value: str) -> str:
        """What rank 0 gives, on every rank."""
        if self.identity.rank == 0:
            self.store.set(what, value)
        elif not self._wait([what], self.seconds + GRACE_SECONDS):
            raise LaunchError(f"{self.identity}: rank 0 does not go on; its own message says why")
        return self.store.get(what).decode()

    def _wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Asks again and again: the store's own wait does not hear a Ctrl-C, and torch prints warnings when
        it times out.
        """
        end, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
        while True:
            try:
                if self.store.check(list(keys)):
                    return True
            except dist.DistError:
                raise LaunchError(f"{self.identity}: rank 0 has ended; its own message says why") from None
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _connect(self, address: str, port: int, environ: Mapping[str, str]) -> dist.Store:
        """The store that rank 0 serves, or torchrun's agent."""
        me = self.identity
        serves = me.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        timeout = timedelta(seconds=self.seconds)
        try:
            return dist.TCPStore(address, port, me.world_size, serves, timeout, wait_for_workers=False)
        except dist.DistError as error:
            if serves:
                raise ConfigError(
                    f"{me}: cannot wait for the other ranks on port {port}, which another program seems to "
                    f"have: set another MASTER_PORT ({error})"
                ) from None
            raise LaunchError(
                f"{me}: rank 0 does not answer at {address}:{port} within {self.seconds:.0f} s: look for "
                "what rank 0 said; where it said nothing, MASTER_ADDR must be a name of its node on a "
                "network that this node reaches"
            ) from None


def _describe_job(identity: Identity, environ: Mapping[str, str], purpose: str) -> str:
    """The same on all ranks of a job, and another text for any other job."""
    if job := slurm_job(environ):
        job += f", start {slurm_restart(environ) + 1}"
        if identity.launcher == "srun":  # with others, ranks on different nodes can stand in different steps
            job += f", step {environ['SLURM_STEP_ID']}"
    else:
        job = f"{identity.launcher} run {environ.get('TORCHELASTIC_RUN_ID', '')}".rstrip()
    return f"{job}, {identity.world_size} ranks, {purpose}"


def numbers(ranks: Iterable[int]) -> str:
    """0-3, 7 of [0, 1, 2, 3, 7]."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
