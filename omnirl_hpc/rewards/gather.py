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
from omnirl_hpc.sampling.samples import GROUP_PLACE

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoredStep:
    """All samples of a step, ordered by group and sample: the same on every rank, whatever their number."""

    rewards: Tensor  # [N] fp64, the weighted sum of all parts; NaN where one of them gave none
    parts: dict[
        str, Tensor
    ]  # name of the part -> [N] fp64 its scores, without the weight; NaN where there is none
    mask: Tensor  # [N] bool, False where there is none
    places: Tensor  # [N] int64, ascending: see Samples.place
    own: Tensor  # [n] int64, the places of this rank's samples, in the order of its batch
    seconds: float  # spent scoring in this rank's workers
    components: dict[str, Tensor] = field(default_factory=dict)  # "PART/COMPONENT" -> [N] fp64, as `parts`

    @property
    def groups(self) -> Tensor:
        """[N] int64."""
        return self.places // GROUP_PLACE

    def weights(self, updates: int, counted: Tensor) -> Tensor:
        """[N] fp32: 1 / (counted samples of the update) for a sample that counts, 0 for another.

        counted: [N] bool. The groups of a step are cut into `updates` consecutive parts of equal size.
        """
        update = self.groups * updates // (int(self.groups.max()) + 1)
        counts = torch.bincount(update[counted], minlength=updates)
        return counted.float() / counts.clamp(min=1)[update]

    def with_groups(self, new: ScoredStep) -> ScoredStep:
        """The step with the groups of `new` in place of its own of the same numbers."""
        kept = ~torch.isin(self.groups, new.groups)
        places = torch.cat([self.places[kept], new.places])
        order = places.argsort()

        def join(ours: Tensor, theirs: Tensor) -> Tensor:
            return torch.cat([ours[kept], theirs])[order]

        own = torch.cat([self.places[self.own][kept[self.own]], new.places[new.own]]).sort().values
        return ScoredStep(
            rewards=join(self.rewards, new.rewards),
            parts={name: join(values, new.parts[name]) for name, values in self.parts.items()},
            mask=join(self.mask, new.mask),
            places=places[order],
            own=torch.searchsorted(places[order], own),
            seconds=self.seconds + new.seconds,
            components={name: join(values, new.components[name]) for name, values in self.components.items()},
        )


def gather_scores(scores: dict[str, Scores], places: Tensor, config: RewardConfig) -> ScoredStep:
    """scores: of this rank's samples, which are at `places` [n] of the step; ranks may have other numbers of
    them. Collective. Raises RewardError on every rank where more than `max_failed_fraction` of them have no
    reward.

    A sample that one part could not score has no reward: the sum of the others would be on another scale.
    """
    details = {
        f"{name}/{component}": values
        for name, part in scores.items()
        for component, values in part.components.items()
    }
    rows = [*(part.values for part in scores.values()), *details.values()]
    own = torch.tensor(rows, dtype=torch.float64, device=places.device)
    together = _all_columns(torch.cat([places.double()[None], own]))
    together = together[:, together[0].argsort()]
    everyones, parts = together[0].long(), dict(zip(scores, together[1:]))
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
    own_places = torch.searchsorted(everyones, places)
    return ScoredStep(rewards, parts, mask, everyones, own_places, seconds, components)


def _all_columns(local: Tensor) -> Tensor:
    """The columns of all ranks side by side; each has its own number of them. Collective."""
    count = torch.tensor(local.shape[1], device=local.device)
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count)
    most = int(torch.stack(counts).max())
    padded = torch.nn.functional.pad(local, (0, most - local.shape[1]))
    everyone = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(everyone, padded)
    return torch.cat([columns[:, : int(n)] for columns, n in zip(everyone, counts)], dim=1)
