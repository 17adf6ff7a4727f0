"""Rewards: one file each. They are imported in worker processes, so they must not import torch."""

from omnirl_hpc.rewards.jpeg_compressibility import JpegCompressibility
from omnirl_hpc.rewards.reward import Reward

REWARDS: dict[str, type[Reward]] = {"jpeg_compressibility": JpegCompressibility}
