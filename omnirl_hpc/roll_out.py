"""Generating a rank's samples and scoring them meanwhile: for a training step and for an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from omnirl_hpc.data.sampler import Group
from omnirl_hpc.layout import Layout
from omnirl_hpc.rewards.mix import RewardMix
from omnirl_hpc.rewards.reward import RewardBatch
from omnirl_hpc.rollout.engine import RolloutEngine, SampleRequest
from omnirl_hpc.sampling.trajectories import Trajectories


def roll_out(
    engine: RolloutEngine,
    rewards: RewardMix,
    layout: Layout,
    requests: Sequence[SampleRequest],
    groups: Sequence[Group],
    check_stop: Callable[[], None],
    num_steps: int | None = None,
) -> Trajectories:
    """This rank's samples. Each micro-batch is submitted to `rewards` while the next one is generated.

    The ranks of a replica generate the same samples together; of every k samples each takes one. `check_stop`
    is called after each micro-batch; `num_steps` is the engine's.
    """
    own, made, k = [], 0, layout.replica_size
    for batch in engine.generate(requests, num_steps):
        check_stop()
        first = (layout.rank_in_replica - made) % k
        made += len(batch)
        batch = batch[first::k]
        if len(batch):
            images = batch.images.permute(0, 2, 3, 1).cpu().numpy()
            rewards.submit(RewardBatch(images, [groups[g].prompt for g in batch.group.tolist()]))
            own.append(batch)
    return torch.cat(own)
