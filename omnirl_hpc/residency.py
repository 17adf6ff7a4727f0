"""Who is on the GPU: rollout and actor take turns (swap), or both stay (resident)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from omnirl_hpc.actor.actor import Actor
from omnirl_hpc.config.schema import Config
from omnirl_hpc.layout import Layout
from omnirl_hpc.metrics.memory import DevicePeaks
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.planning.residency import choose_residency
from omnirl_hpc.rollout.engine import RolloutEngine


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


class Residency:
    """Gives the device to the engine or to the actor; asking for what is already so does nothing.

    In swap mode, construct with the actor offloaded: the engine is built on a device that it has to itself.
    """

    def __init__(
        self, mode: str, engine: RolloutEngine, actor: Actor, timer: PhaseTimer, peaks: DevicePeaks
    ) -> None:
        self._swaps = mode == "swap"
        self._engine, self._actor, self._timer, self._peaks = engine, actor, timer, peaks
        self._engine_awake, self._actor_onloaded = True, not self._swaps

    def to_engine(self) -> None:
        """Before rollout and before the engine takes new weights."""
        self._peaks.book("actor")
        if self._swaps:
            with self._timer.phase("swap"):
                if self._actor_onloaded:
                    self._actor.offload()
                if not self._engine_awake:
                    self._engine.wake()
            self._actor_onloaded, self._engine_awake = False, True

    def to_actor(self) -> None:
        """Before log-probabilities, updates and checkpoints."""
        self._peaks.book("rollout")
        if self._swaps:
            with self._timer.phase("swap"):
                if self._engine_awake:
                    self._engine.sleep()
                if not self._actor_onloaded:
                    self._actor.onload()
            self._actor_onloaded, self._engine_awake = True, False
