"""Where the ranks of a job meet before there is a process group: a key-value store, with deadlines that name
who is missing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist

from omnirl_hpc.errors import ConfigError, LaunchError
from omnirl_hpc.launch.identity import Identity

GRACE_SECONDS = 10.0  # that other ranks wait longer than rank 0, which alone can say who is missing
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.01, 0.25  # between two questions to the store


class Rendezvous:
    """All ranks construct it, and call its methods in the same order.

    Raises LaunchError where one does not, and ConfigError where rank 0's port is taken.
    """

    def __init__(self, identity: Identity, timeout_seconds: float) -> None:
        self.identity, self.seconds = identity, timeout_seconds
        self.store: dist.Store = dist.HashStore() if identity.master_addr is None else self._connect()
        self.gather("host", socket.gethostname())
        self.share("all are here", "")

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
                f"rank(s) {numbers(missing)} of {self.identity.world_size} did not arrive within {self.seconds:.0f} s; the "
                f"others are on {', '.join(sorted(hosts))}: look for what the missing ranks said, and whether their node reaches "
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

    def _connect(self) -> dist.Store:
        """The store that rank 0 serves, or torchrun's agent."""
        me = self.identity
        serves = me.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        timeout = timedelta(seconds=self.seconds)
        try:
            store = dist.TCPStore(
                me.master_addr, me.master_port, me.world_size, serves, timeout, wait_for_workers=False
            )
        except dist.DistError as error:
            if serves:
                raise ConfigError(
                    f"{me}: cannot wait for the other ranks on port {me.master_port}, which another program seems to have: set "
                    f"another MASTER_PORT ({error})"
                ) from None
            raise LaunchError(
                f"{me}: rank 0 does not answer at {me.master_addr}:{me.master_port} within {self.seconds:.0f} s: look for what "
                "rank 0 said; where it said nothing, MASTER_ADDR must be a name of its node on a network that this node reaches"
            ) from None
        return dist.PrefixStore("omnirl_hpc", store)


def numbers(ranks: Iterable[int]) -> str:
    """0-3, 7 of [0, 1, 2, 3, 7]."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
