"""Rewards: one file each. Worker processes import them: they must not import torch before they are made."""

from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.rewards.reward import Reward, RewardBatch, ScoresWithComponents

__all__ = ["Reward", "RewardBatch", "RewardPartConfig", "ScoresWithComponents"]
