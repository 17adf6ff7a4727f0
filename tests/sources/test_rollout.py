"""What an algorithm learns from where a reward has several parts."""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.config.schema import RewardConfig, RewardPartConfig
from omnirl_hpc.rewards.gather import ScoredStep
from omnirl_hpc.sources.rollout import learned_rewards


def test_parts_are_mixed_as_the_settings_say():
    """Two scores of very different scale and opposite order: added up, the large one decides; normalised in
    their group they cancel out but for their weights.
    """
    parts = {"large": torch.tensor([100.0, 300.0]).double(), "small": torch.tensor([0.2, 0.1]).double()}
    rewards = parts["large"] + 3 * parts["small"]
    groups, mask = torch.tensor([0, 0]), torch.ones(2, dtype=torch.bool)
    scored = ScoredStep(rewards, parts, mask, groups, torch.arange(2), 0.0)
    weights = {"large": RewardPartConfig(), "small": RewardPartConfig(weight=3.0)}
    assert torch.equal(learned_rewards(scored, RewardConfig(weights)), rewards)
    mixed = learned_rewards(scored, RewardConfig(weights, mix="normalized"))
    # each part is -+ 1/sqrt(2): large -.707, +.707; small 3 x (+.707, -.707), but for 1e-4 beside a deviation
    assert mixed.tolist() == pytest.approx([2**0.5, -(2**0.5)], rel=0.01)
