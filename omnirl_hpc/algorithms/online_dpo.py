"""Diffusion-DPO (arXiv 2311.12908) on samples of the policy itself: the best and the worst of each group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from omnirl_hpc.algorithms.advantages import zero_std_groups
from omnirl_hpc.algorithms.algorithm import ROLLOUT
from omnirl_hpc.algorithms.dpo import DPO, DPOConfig
from omnirl_hpc.algorithms.units import Batch, Pairs
from omnirl_hpc.sampling.samples import Samples
from omnirl_hpc.sampling.streams import map_streams


@dataclass
class OnlineDPOConfig(DPOConfig):
    """The temperature is that of verl-omni's recipes: the paper's 2000 is for a table and smaller steps."""

    name: str = "online_dpo"
    beta: float = 100.0


class OnlineDPO(DPO):
    """The loss of DPO on one pair of each group: its samples with the highest and with the lowest reward, the
    first of equal ones. A group whose rewards are all equal prefers nothing, and counts nothing (verl-omni
    trains a pair of it). The reference is the model before training.
    """

    Settings = OnlineDPOConfig
    settings: OnlineDPOConfig
    source = ROLLOUT
    whole_groups = True

    @property
    def units_per_prompt(self) -> int:
        return 1

    def advantages(self, rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
        """1 for the best sample of a group, -1 for the worst, 0 for all others."""
        result = torch.zeros(rewards.shape, device=rewards.device)
        equal = set(zero_std_groups(rewards, groups, mask))
        for group in torch.unique(groups).tolist():
            if group not in equal:
                members = ((groups == group) & mask).nonzero().squeeze(1)
                result[members[rewards[members].argmax()]] = 1
                result[members[rewards[members].argmin()]] = -1
        return result

    def counted(self, advantages: Tensor, mask: Tensor) -> Tensor:
        return advantages != 0

    def units(self, samples: Samples, advantages: Tensor, weights: Tensor) -> Batch:
        """A pair of each group, which weighs as its two samples do: those of an update sum to 1."""
        groups = torch.unique(samples.group, sorted=True)
        best, worst, first = [], [], []
        for group in groups:
            members = (samples.group == group).nonzero().squeeze(1)
            best.append(members[advantages[members].argmax()])
            worst.append(members[advantages[members].argmin()])
            first.append(int(members[0]))
        chosen, rejected = torch.stack(best), torch.stack(worst)
        pairs = Pairs(
            identity=[samples.identity[row] for row in first],
            group=groups,
            conditions=[samples.conditions[row] for row in first],
            chosen=map_streams(lambda latents: latents[chosen], samples.clean),
            rejected=map_streams(lambda latents: latents[rejected], samples.clean),
        )
        return Batch(pairs, torch.ones_like(weights[chosen]), weights[chosen] + weights[rejected])
