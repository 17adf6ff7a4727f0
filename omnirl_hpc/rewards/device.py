"""Scores micro-batches on the rank's device, in turn with engine and actor: for rewards with networks of some
size.
"""

from __future__ import annotations

import torch

from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.errors import RewardError
from omnirl_hpc.pinned import PinnedTensors
from omnirl_hpc.rewards.call import call_reward, describe_failure, make_reward
from omnirl_hpc.rewards.reward import RewardBatch
from omnirl_hpc.rewards.runner import Scores, join


class DeviceRunner:
    """See RewardRunner, and residency.Tenant. Micro-batches wait for `collect`, which needs it awake.

    It runs in the rank itself: of its calls none has a deadline but that of collective operations, which the
    other ranks wait in.
    """

    def __init__(self, name: str, settings: RewardPartConfig, device: torch.device) -> None:
        self._name, self._device = name, device
        self._submitted: list[RewardBatch] = []
        self._pinned = PinnedTensors()
        self._reward, self._why_not = make_reward(settings)
        if self._reward is None:
            return
        try:
            for module in self._reward.modules():
                module.requires_grad_(False).eval().to(device)
                self._pinned.add([*module.parameters(), *module.buffers()], frozen=True)
        except RuntimeError as failure:  # out of memory, or modules() is not implemented
            self._why_not = describe_failure(failure)

    def wait_until_made(self) -> None:
        if self._why_not is not None:
            raise RewardError(f"reward {self._name} could not be made: {self._why_not}")

    def submit(self, batch: RewardBatch) -> None:
        self._submitted.append(batch)

    @torch.no_grad()
    def collect(self) -> Scores:
        assert self._reward is not None  # wait_until_made
        if self._pinned.offloaded:
            raise RuntimeError(f"reward {self._name} is asleep: wake() it before use")
        outcomes = []
        for batch in self._submitted:
            on_device = batch.with_arrays(lambda tensor: tensor.to(self._device, copy=True))
            outcomes.append((len(batch.prompts), call_reward(self._reward, on_device)))
        self._submitted.clear()
        return join(outcomes, self._reward.components)

    def close(self) -> None:
        """There are no workers."""

    def sleep(self) -> None:
        self._pinned.offload()

    def wake(self) -> None:
        self._pinned.onload()
