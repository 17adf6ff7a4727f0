"""The least memory and disk that a run can do with. What a run really takes is more; less than this cannot
work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omnirl_hpc.config.schema import Config
from omnirl_hpc.planning.estimate import builds_engine
from omnirl_hpc.planning.trained import ADAM_MOMENTS, BYTES, parameter_count, trained_part


@dataclass(frozen=True)
class Needs:
    """Bytes."""

    gpu: int  # of each rank
    host: int  # of each rank: a node needs as many times as much as it has ranks
    disk: int  # in run_dir


def least_needs(
    config: Config, shapes: dict[str, tuple[int, ...]], targets: Sequence[str], world_size: int
) -> Needs:
    """From the shapes of the transformer's tensors alone: text encoder, VAE and activations come on top.

    swap keeps the engine's and the actor's weights in page-locked host memory, and one of the two on the GPU;
    auto, where what it becomes is not known, is taken to need the least of both. Where no engine is built,
    there are only the actor's.
    """
    parameters, part = parameter_count(shapes), trained_part(config.actor)
    engine = 0
    if builds_engine(config):
        engine = parameters * BYTES[config.rollout.dtype] // config.rollout.tensor_parallel_size
    ranks, swap = config.actor.shard_size or world_size, config.residency != "resident"
    trained = part.least_parameters(shapes, targets) * BYTES[part.dtype] * (1 + ADAM_MOMENTS)
    if config.actor.adapter is None:
        actor = training = (
            trained // ranks
        )  # a stop in mid-step goes back to a copy of it in host memory, always
    else:
        actor, training = parameters * BYTES[config.actor.dtype] // ranks, 0
    gpu = max(engine, actor) if swap else engine + actor
    host = engine + actor if config.residency == "swap" else training
    # In each checkpoint that is kept; twice, because one more is being written while the oldest is there, and
    # samples and logs need room too.
    return Needs(gpu=gpu, host=host, disk=2 * config.checkpoint.keep * trained)
