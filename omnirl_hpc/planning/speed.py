"""Floating-point operations of a training step, and the seconds that they take."""

from __future__ import annotations

from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import Config
from omnirl_hpc.layout import Layout
from omnirl_hpc.planning.estimate import (
    BYTES,
    adapter_parameters,
    engine_weights,
    find_shape,
    frozen_weights,
    guidance_branches,
    samples_of_rank,
    trained_weights,
    typical_text_width,
)
from omnirl_hpc.planning.gpus import Gpu
from omnirl_hpc.planning.measured import (
    ACTOR_EFFICIENCY,
    FP32_SLOWDOWN,
    HOST_LINK_EFFICIENCY,
    MERGE_BYTES_PER_SECOND,
    OLD_LOG_PROB_EFFICIENCY,
    ROLLOUT_EFFICIENCY,
    SYNC_BYTES_PER_SECOND,
)


def step_flops(config: Config, layout: Layout, text_width: int | None = None) -> dict[str, float]:
    """Operations of one rank in one step, by phase, with the rank's share of its replica's generation."""
    shape, text_width = find_shape(config), text_width or typical_text_width(config)
    forward, full = shape.forward_flops(text_width), config.actor.train == "full"
    backward = shape.full_backward_flops(text_width) if full else shape.lora_backward_flops(text_width)
    algorithm = find_class("algorithm", config.algorithm.name)(config)
    branches = samples_of_rank(config, layout) * guidance_branches(config)
    generated = branches * config.sampling.num_inference_steps if algorithm.source == "rollout" else 0
    points = branches * algorithm.points_per_unit
    later_updates = 1 - 1 / config.actor.updates_per_step  # the first update is its own old policy
    forwards = 2 if config.actor.activation_checkpointing else 1
    forwards += len(algorithm.policies) - 1  # those of the others have no gradients
    return {
        "rollout": generated * forward,
        "old_log_prob": later_updates * points * forward if algorithm.recomputes_old else 0.0,
        "actor": points * (forwards * forward + backward),
    }


def step_seconds(config: Config, layout: Layout, gpu: Gpu, text_width: int | None = None) -> dict[str, float]:
    """Seconds of one step by phase, from the operations and the efficiencies of planning/measured.py."""
    flops = step_flops(config, layout, text_width)
    rollout, actor = config.rollout, config.actor
    alone = actor.train == "full" and rollout.engine == "vllm_omni"  # no adapter beside the weights
    efficiency = ROLLOUT_EFFICIENCY[rollout.engine, "merged" if alone else rollout.lora, rollout.compile]
    seconds = {
        "rollout": flops["rollout"] / (gpu.flops * efficiency) * slowdown(rollout.dtype),
        "old_log_prob": flops["old_log_prob"]
        / (gpu.flops * OLD_LOG_PROB_EFFICIENCY[actor.compile])
        * slowdown(actor.dtype),
        "actor": flops["actor"] / (gpu.flops * ACTOR_EFFICIENCY[actor.compile]) * slowdown(actor.dtype),
    }
    return seconds | {"swap": swap_seconds(config, layout, gpu), "sync": sync_seconds(config, layout, gpu)}


def slowdown(dtype: str) -> float:
    return FP32_SLOWDOWN if dtype == "float32" else 1.0


def swap_seconds(config: Config, layout: Layout, gpu: Gpu) -> float:
    """Engine and actor come back once a step; only what the optimizer changes is copied out."""
    if config.residency == "resident":
        return 0.0
    shape = find_shape(config)
    engine = sum(
        size
        for name, size in engine_weights(config, shape, layout).items()
        if name not in config.rollout.awake
    )
    frozen, trained = (
        sum(part(config, shape, layout).values()) for part in (frozen_weights, trained_weights)
    )
    return (engine + frozen + 2 * trained) / (gpu.host_link * HOST_LINK_EFFICIENCY)


def sync_seconds(config: Config, layout: Layout, gpu: Gpu) -> float:
    """Of all weights only the copies to host memory count: their gathering and their checksums have not been
    measured.
    """
    shape = find_shape(config)
    if config.actor.train == "full":
        return engine_weights(config, shape, layout)["transformer"] / (gpu.host_link * HOST_LINK_EFFICIENCY)
    seconds = BYTES[config.rollout.dtype] * adapter_parameters(config, shape) / SYNC_BYTES_PER_SECOND
    if config.rollout.lora == "merged":
        seconds += engine_weights(config, shape, layout)["transformer"] / MERGE_BYTES_PER_SECOND
    return seconds
