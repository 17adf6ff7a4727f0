"""DanceGRPO (arXiv 2505.07818): GRPO on some of the steps of a trajectory, from initial noise that a group
shares.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from omnirl_hpc.algorithms.flow_grpo import FlowGRPO, FlowGRPOConfig
from omnirl_hpc.errors import require
from omnirl_hpc.sampling.noise import TRAINING_TIMESTEP, permutation
from omnirl_hpc.sampling.samples import Samples


@dataclass
class DanceGRPOConfig(FlowGRPOConfig):
    """Defaults are those of the authors' code for FLUX."""

    name: str = "dance_grpo"
    clip_range: float = 1e-4
    advantage_std: Optional[str] = "group"
    timestep_fraction: float = 0.6  # of the steps of a window that a sample is trained at

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction = self.timestep_fraction
        require(0 < fraction <= 1, f"algorithm.timestep_fraction={fraction} must be above 0 and at most 1")


class DanceGRPO(FlowGRPO):
    """Flow-GRPO's loss at a fraction of the stochastic steps, in an order of each sample's own. To be used as
    in the paper with sampling=dance, its stochastic differential equation; with sampling.window.size=null,
    every step but the last stochastic; and with sampling.shared_noise=true, so that only these steps tell the
    samples of a group apart.
    """

    Settings = DanceGRPOConfig
    settings: DanceGRPOConfig

    @property
    def points_per_unit(self) -> int:
        return max(1, int(super().points_per_unit * self.settings.timestep_fraction))

    def places(self, samples: Samples, steps: int) -> Iterable[int | Tensor]:
        orders = [permutation(steps, *who.address(TRAINING_TIMESTEP)) for who in samples.identity]
        return torch.tensor(orders).T[: self.points_per_unit].unbind()
