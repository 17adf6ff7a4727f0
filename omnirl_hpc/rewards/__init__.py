"""Rewards: one file each. They are imported in worker processes, so they must not import torch."""

from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.rewards.reward import Reward, RewardBatch

__all__ = ["Reward", "RewardBatch", "RewardPartConfig"]
