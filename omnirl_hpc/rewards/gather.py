"""The rewards of a step, brought together from all ranks: floats travel, pixels do not."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from omnirl_hpc.config.schema import RewardConfig
from omnirl_hpc.errors import RewardError
from omnirl_hpc.rewards.runner import Scores
from omnirl_hpc.sampling.trajectories import Trajectories

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoredStep:
    """All samples of a step, ordered by group and sample: the same on every rank, whatever their number."""

    rewards: Tensor  # [N] fp64; NaN where there is none
    mask: Tensor  # [N] bool, False where there is none
    groups: Tensor  # [N] int64
    own: Tensor  # [n] int64, the places of this rank's samples, in the order of its batch
    seconds: float  # spent scoring in this rank's workers

    def weights(self, updates: int) -> Tensor:
        """[N] fp32: 1 / (valid samples of the update) for a valid sample, 0 for one without a reward.

        The groups of a step are cut into `updates` consecutive parts of equal size.
        """
        update = self.groups * updates // (int(self.groups.max()) + 1)
        counts = torch.bincount(update[self.mask], minlength=updates)
        return self.mask.float() / counts.clamp(min=1)[update]


def gather_scores(scores: Scores, batch: Trajectories, config: RewardConfig) -> ScoredStep:
    """Collective. Raises RewardError on every rank where more than `max_failed_fraction` of the step has no reward."""
    device = batch.group.device
    identity = batch.group * 2**32 + batch.sample  # orders by group, then by sample
    local = torch.stack([identity.double(), torch.tensor(scores.values, dtype=torch.float64, device=device)])
    everyone = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, local)
    identities, rewards = torch.cat(everyone, dim=1)
    order = identities.argsort()
    identities, rewards = identities[order].long(), rewards[order]
    mask = torch.isfinite(rewards)
    for error in scores.errors:
        log.warning("reward %s failed: %s", config.name, error)
    failed = int((~mask).sum())
    if failed > config.max_failed_fraction * len(rewards):
        causes = f"; first failure on this rank: {scores.errors[0]}" if scores.errors else ""
        raise RewardError(
            f"reward {config.name} gave no finite score for {failed} of {len(rewards)} samples, "
            f"more than reward.max_failed_fraction={config.max_failed_fraction} allows{causes}"
        )
    return ScoredStep(rewards, mask, identities // 2**32, torch.searchsorted(identities, identity), scores.seconds)
