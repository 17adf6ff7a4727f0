"""Generating a rank's samples and scoring them meanwhile: for a training step and for an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omnirl_hpc.data.sampler import Group
from omnirl_hpc.layout import Layout
from omnirl_hpc.rewards.mix import RewardMix
from omnirl_hpc.rewards.reward import RewardBatch
from omnirl_hpc.rollout.engine import RolloutEngine, SampleRequest
from omnirl_hpc.sampling.samples import Samples


def roll_out(
    engine: RolloutEngine,
    rewards: RewardMix,
    layout: Layout,
    requests: Sequence[SampleRequest],
    groups: Sequence[Group],
    check_stop: Callable[[], None],
    num_steps: int | None = None,
) -> Samples:
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
            rewards.submit(reward_batch(batch, groups))
            own.append(batch)
    return Samples.cat(own)


def reward_batch(batch: Samples, groups: Sequence[Group]) -> RewardBatch:
    """What rewards see of samples."""
    media = batch.media
    return RewardBatch(
        frames=media.frames.permute(0, 1, 3, 4, 2).numpy(),
        prompts=[groups[group].prompt for group in batch.group.tolist()],
        audio=None if media.audio is None else media.audio.numpy(),
        fps=media.fps,
        sample_rate=media.sample_rate,
    )
