"""Floating-point operations of a training step, and the seconds that they take."""

from __future__ import annotations

from omnirl_hpc.config.schema import Config
from omnirl_hpc.layout import Layout
from omnirl_hpc.planning.estimate import (
    builds_engine,
    encoder_weights,
    engine_weights,
    find_algorithm,
    find_shape,
    frozen_weights,
    guidance_branches,
    samples_of_rank,
    trained_weights,
    training_branches,
    typical_text_width,
    units_of_rank,
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
from omnirl_hpc.planning.trained import BYTES, trained_part


def step_flops(config: Config, layout: Layout, text_width: int | None = None) -> dict[str, float]:
    """Operations of one rank in one step, by phase, with the rank's share of its replica's generation."""
    shape, text_width = find_shape(config), text_width or typical_text_width(config)
    forward = shape.forward_flops(text_width)
    backward = trained_part(config.actor).backward_flops(shape, text_width)
    algorithm, samples = find_algorithm(config), samples_of_rank(config, layout)
    trained = units_of_rank(config, layout) * algorithm.samples_per_unit
    points = trained * training_branches(config) * algorithm.points_per_unit
    later_updates = 1 - 1 / config.actor.updates_per_step  # the first update is its own old policy
    evaluated = 1 if algorithm.corrects else later_updates  # before anything is learned
    forwards = 2 if config.actor.activation_checkpointing else 1
    forwards += len(algorithm.policies) - 1  # those of the others have no gradients
    update = {"actor": points * (forwards * forward + backward)}
    if algorithm.source != "rollout":
        return update
    return {
        "rollout": samples * guidance_branches(config) * config.sampling.num_inference_steps * forward,
        "old_log_prob": evaluated * points * forward if algorithm.recomputes_old else 0.0,
    } | update


def step_seconds(config: Config, layout: Layout, gpu: Gpu, text_width: int | None = None) -> dict[str, float]:
    """Seconds of one step by phase, from the operations and the efficiencies of planning/measured.py."""
    flops = step_flops(config, layout, text_width)
    actor = config.actor
    speeds = {
        "rollout": (rollout_efficiency(config), config.rollout.dtype),
        "old_log_prob": (OLD_LOG_PROB_EFFICIENCY[actor.compile], actor.dtype),
        "actor": (ACTOR_EFFICIENCY[actor.compile], actor.dtype),
    }
    seconds = {
        phase: flops[phase] / (gpu.flops * efficiency) * slowdown(dtype)
        for phase, (efficiency, dtype) in speeds.items()
        if phase in flops
    }
    seconds["swap"] = swap_seconds(config, layout, gpu)
    return seconds | ({"sync": sync_seconds(config, layout, gpu)} if builds_engine(config) else {})


def rollout_efficiency(config: Config) -> float:
    """With vLLM-Omni and no adapter beside the weights, that of merged ones."""
    rollout = config.rollout
    alone = config.actor.adapter is None and rollout.engine == "vllm_omni"
    return ROLLOUT_EFFICIENCY[rollout.engine, "merged" if alone else rollout.lora, rollout.compile]


def slowdown(dtype: str) -> float:
    return FP32_SLOWDOWN if dtype == "float32" else 1.0


def swap_seconds(config: Config, layout: Layout, gpu: Gpu) -> float:
    """Both sides come back once a step; only what the optimizer changes is copied out."""
    if config.residency == "resident":
        return 0.0
    shape = find_shape(config)
    sampling = sum(encoder_weights(config, shape).values())
    if builds_engine(config):
        weights = engine_weights(config, shape, layout)
        sampling += sum(size for name, size in weights.items() if name not in config.rollout.awake)
    frozen, trained = (
        sum(part(config, shape, layout).values()) for part in (frozen_weights, trained_weights)
    )
    return (sampling + frozen + 2 * trained) / (gpu.host_link * HOST_LINK_EFFICIENCY)


def sync_seconds(config: Config, layout: Layout, gpu: Gpu) -> float:
    """Of all weights only the copies to host memory count: their gathering and their checksums have not been
    measured.
    """
    shape = find_shape(config)
    places = trained_part(config.actor).engine_parameters(shape)
    if not places:
        return engine_weights(config, shape, layout)["transformer"] / (gpu.host_link * HOST_LINK_EFFICIENCY)
    seconds = BYTES[config.rollout.dtype] * places / SYNC_BYTES_PER_SECOND
    if config.rollout.lora == "merged":
        seconds += engine_weights(config, shape, layout)["transformer"] / MERGE_BYTES_PER_SECOND
    return seconds
