"""A reward from outside of the package, in one file: a network on the device, with components."""

from __future__ import annotations

from omnirl_hpc.rewards import Reward, RewardBatch, ScoresWithComponents
from omnirl_hpc.rewards.reward import DEVICE


class Blend(Reward):
    """A linear layer over the mean colour of a video."""

    needs = ("video",)
    runs_in = DEVICE
    components = ("red", "blue")

    def __init__(self, settings) -> None:
        super().__init__(settings)
        import torch

        self.layer = torch.nn.Linear(3, 2, bias=False)
        self.layer.weight.data = torch.tensor([[1.0, 0, 0], [0, 0, 1.0]])

    def modules(self):
        return [self.layer]

    def score(self, batch: RewardBatch) -> ScoresWithComponents:
        colours = batch.frames.float().mean(dim=(1, 2, 3)) / 255  # [B, 3]
        red, blue = self.layer(colours).unbind(1)
        return ScoresWithComponents(red - blue, {"red": red, "blue": blue})
