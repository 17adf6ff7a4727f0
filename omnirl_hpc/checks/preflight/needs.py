"""The least memory and disk that a run can do with. What a run really takes is more; less than this cannot
work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omnirl_hpc.checks.preflight.model_files import parameter_count
from omnirl_hpc.config.schema import Config

BYTES = {"float32": 4, "bfloat16": 2}
ADAM_MOMENTS = 2


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
    auto, where what it becomes is not known, is taken to need the least of both.
    """
    parameters = parameter_count(shapes)
    engine = parameters * BYTES[config.rollout.dtype] // config.rollout.tensor_parallel_size
    ranks, swap = config.actor.shard_size or world_size, config.residency != "resident"
    if config.actor.train == "full":
        trained = parameters * BYTES["float32"] * (1 + ADAM_MOMENTS)
        actor = training = (
            trained // ranks
        )  # a stop in mid-step goes back to a copy of it in host memory, always
    else:
        # A and B of each target
        adapter = sum(config.actor.lora.rank * sum(shape) for shape in _targeted(shapes, targets))
        trained = adapter * BYTES[config.actor.lora.dtype] * (1 + ADAM_MOMENTS)
        actor, training = parameters * BYTES[config.actor.dtype] // ranks, 0
    gpu = max(engine, actor) if swap else engine + actor
    host = engine + actor if config.residency == "swap" else training
    # In each checkpoint that is kept; twice, because one more is being written while the oldest is there, and
    # samples and logs need room too.
    return Needs(gpu=gpu, host=host, disk=2 * config.checkpoint.keep * trained)


def _targeted(shapes: dict[str, tuple[int, ...]], targets: Sequence[str]) -> list[tuple[int, ...]]:
    endings = tuple(f".{target}.weight" for target in targets)
    return [shape for name, shape in shapes.items() if f".{name}".endswith(endings)]
