"""Who is on the GPU: tenants take turns (swap), or all stay (resident)."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from omnirl_hpc.config.schema import Config
from omnirl_hpc.layout import Layout
from omnirl_hpc.metrics.memory import DevicePeaks
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.planning.residency import choose_residency

# The sides: for rollout and sync | for scores that networks on the device give | for updates and checkpoints
ROLLOUT, REWARD, ACTOR = "rollout", "reward", "actor"


def settle_residency(config: Config, layout: Layout, device: torch.device) -> str:
    """Replace residency=auto in `config` by swap or resident, the same on every rank, and say why.
    Collective.

    Raises ConfigError where the planner does not know the model.
    """
    if device.type != "cuda":
        config.residency = "resident"
        return "there is no GPU to share"
    memory = torch.tensor(torch.cuda.get_device_properties(device).total_memory, device=device)
    dist.all_reduce(memory, op=dist.ReduceOp.MIN)
    config.residency, why = choose_residency(config, layout, float(memory))
    return why


class Tenant(Protocol):
    """Something that holds memory of the device: the engine, the actor, a reward with a model of its own."""

    def sleep(self) -> None:
        """Free the device. No use until `wake`."""

    def wake(self) -> None:
        """Come back, bit for bit."""


class Residency:
    """Gives the device to one side, a list of tenants, at a time; asking for what is already so does nothing.

    The rollout side has it first.
    """

    def __init__(self, mode: str, timer: PhaseTimer, peaks: DevicePeaks) -> None:
        self._swaps = mode == "swap"
        self._timer, self._peaks = timer, peaks
        self._sides: dict[str, list[Tenant]] = {ROLLOUT: [], REWARD: [], ACTOR: []}
        self._holder = ROLLOUT

    def add(self, side: str, tenant: Tenant) -> None:
        """A tenant that has just been built, awake: it goes to sleep where it is not its side's turn, since
        not all may fit together, not even while they are built.
        """
        self._sides[side].append(tenant)
        if self._swaps and side != self._holder:
            tenant.sleep()

    def give_to(self, side: str) -> None:
        """Let the tenants of a side work. A side without tenants needs no device."""
        if side == self._holder or not self._sides[side]:
            return
        self._peaks.book(self._holder)
        if self._swaps:
            with self._timer.phase("swap"):
                for tenant in self._sides[self._holder]:
                    tenant.sleep()
                for tenant in self._sides[side]:
                    tenant.wake()
        self._holder = side
