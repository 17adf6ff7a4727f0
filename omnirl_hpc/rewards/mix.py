"""The parts of a reward, side by side: each scores the same micro-batches where it runs."""

from __future__ import annotations

import torch

from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import RewardConfig, RewardPartConfig
from omnirl_hpc.errors import RewardError
from omnirl_hpc.rewards.device import DeviceRunner
from omnirl_hpc.rewards.processes import ProcessRunner
from omnirl_hpc.rewards.reward import DEVICE, THREAD, RewardBatch
from omnirl_hpc.rewards.runner import RewardRunner, Scores
from omnirl_hpc.rewards.threads import ThreadRunner


class RewardMix:
    """What a source scores with. How scores are added up is the business of `gather_scores`."""

    def __init__(self, config: RewardConfig, device: torch.device) -> None:
        """Make every part in its workers, side by side. Raises RewardError where one cannot be made.

        Those on `device` are made first, since workers start by themselves.
        """
        self._needs = {name: find_class("reward", part.name).needs for name, part in config.parts.items()}
        self._runners = {name: make_runner(name, part, device) for name, part in config.parts.items()}
        self.tenants = [runner for runner in self._runners.values() if isinstance(runner, DeviceRunner)]
        try:
            for runner in self._runners.values():
                runner.wait_until_made()
        except RewardError:
            self.close()
            raise

    def submit(self, batch: RewardBatch) -> None:
        """Start scoring samples, given as tensors; returns at once. Raises RewardError when a worker is gone.

        Each reward gets copies: what it does to them changes nothing that is trained on.
        """
        for name, runner in self._runners.items():
            needed = batch.only(self._needs[name])
            if not isinstance(runner, DeviceRunner):
                needed = needed.with_arrays(lambda tensor: tensor.to("cpu", copy=True).numpy())
            runner.submit(needed)

    def collect(self) -> dict[str, Scores]:
        """The scores of everything submitted, with all `tenants` awake. Raises RewardError at the deadline of
        a part or when a worker is gone.
        """
        return {name: runner.collect() for name, runner in self._runners.items()}

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        for runner in self._runners.values():
            runner.close()


def make_runner(name: str, settings: RewardPartConfig, device: torch.device) -> RewardRunner:
    """Where the class says that it runs."""
    place = find_class("reward", settings.name).runs_in
    if place == DEVICE:
        return DeviceRunner(name, settings, device)
    return (ThreadRunner if place == THREAD else ProcessRunner)(name, settings)
