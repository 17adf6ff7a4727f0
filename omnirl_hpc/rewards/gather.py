"""The rewards of a step, brought together from all ranks: floats travel, pixels do not."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from omnirl_hpc.config.schema import RewardConfig
from omnirl_hpc.errors import RewardError
from omnirl_hpc.rewards.runner import Scores
from omnirl_hpc.sampling.samples import Samples

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoredStep:
    """All samples of a step, ordered by group and sample: the same on every rank, whatever their number."""

    rewards: Tensor  # [N] fp64, the weighted sum of all parts; NaN where one of them gave none
    parts: dict[
        str, Tensor
    ]  # name of the part -> [N] fp64 its scores, without the weight; NaN where there is none
    mask: Tensor  # [N] bool, False where there is none
    groups: Tensor  # [N] int64
    own: Tensor  # [n] int64, the places of this rank's samples, in the order of its batch
    seconds: float  # spent scoring in this rank's workers
    components: dict[str, Tensor] = field(default_factory=dict)  # "PART/COMPONENT" -> [N] fp64, as `parts`

    def weights(self, updates: int) -> Tensor:
        """[N] fp32: 1 / (valid samples of the update) for a valid sample, 0 for one without a reward.

        The groups of a step are cut into `updates` consecutive parts of equal size.
        """
        update = self.groups * updates // (int(self.groups.max()) + 1)
        counts = torch.bincount(update[self.mask], minlength=updates)
        return self.mask.float() / counts.clamp(min=1)[update]


def gather_scores(scores: dict[str, Scores], batch: Samples, config: RewardConfig) -> ScoredStep:
    """Collective. Raises RewardError on every rank where more than `max_failed_fraction` of the step has no
    reward.

    A sample that one part could not score has no reward: the sum of the others would be on another scale.
    """
    identity = batch.group * 2**32 + batch.sample  # orders by group, then by sample
    details = {
        f"{name}/{component}": values
        for name, part in scores.items()
        for component, values in part.components.items()
    }
    rows = [*(part.values for part in scores.values()), *details.values()]
    own = torch.tensor(rows, dtype=torch.float64, device=identity.device)
    local = torch.cat([identity.double()[None], own])
    everyone = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, local)
    together = torch.cat(everyone, dim=1)
    together = together[:, together[0].argsort()]
    identities, parts = together[0].long(), dict(zip(scores, together[1:]))
    components = dict(zip(details, together[1 + len(scores) :]))
    rewards = sum(config.parts[name].weight * values for name, values in parts.items())
    mask = torch.isfinite(rewards)
    errors = [(name, error) for name, part in scores.items() for error in part.errors]
    for name, error in errors:
        log.warning("reward %s failed: %s", name, error)
    if int((~mask).sum()) > config.max_failed_fraction * len(rewards):
        failed = {name: int((~torch.isfinite(values)).sum()) for name, values in parts.items()}
        counts = " and ".join(
            f"reward {name} gave no finite score for {count}" for name, count in failed.items() if count
        )
        raise RewardError(
            f"{counts} of {len(rewards)} samples, more than "
            f"reward.max_failed_fraction={config.max_failed_fraction} allows"
            + (f"; first failure on this rank: {errors[0][1]}" if errors else "")
        )
    seconds = sum(part.seconds for part in scores.values())
    own_places = torch.searchsorted(identities, identity)
    return ScoredStep(rewards, parts, mask, identities // 2**32, own_places, seconds, components)
