"""The parts of a reward, side by side: each scores the same micro-batches in workers of its own."""

from __future__ import annotations

from omnirl_hpc.config.schema import RewardConfig
from omnirl_hpc.errors import RewardError
from omnirl_hpc.rewards.reward import RewardBatch
from omnirl_hpc.rewards.runner import RewardRunner, Scores


class RewardMix:
    """What the trainer scores with. How scores are added up is the business of `gather_scores`."""

    def __init__(self, config: RewardConfig) -> None:
        """Make every part in its workers, side by side. Raises RewardError where one cannot be made."""
        self._runners = {name: RewardRunner(name, part) for name, part in config.parts.items()}
        try:
            for runner in self._runners.values():
                runner.wait_until_made()
        except RewardError:
            self.close()
            raise

    def submit(self, batch: RewardBatch) -> None:
        """Start scoring; returns at once. Raises RewardError when a worker process is gone."""
        for runner in self._runners.values():
            runner.submit(batch)

    def collect(self) -> dict[str, Scores]:
        """Wait for everything submitted. Raises RewardError at the deadline of a part or when a worker
        process is gone.
        """
        return {name: runner.collect() for name, runner in self._runners.items()}

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        for runner in self._runners.values():
            runner.close()
