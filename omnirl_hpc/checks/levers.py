"""Which settings to change where a run does not fit, or where its layout cannot be."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from omnirl_hpc.checks.rules import check
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.layout import make_layout
from omnirl_hpc.planning.estimate import estimate, units_of_rank

Change = dict[str, Any]  # key -> value


def changed(config: Config, change: Change) -> Config:
    """A copy of `config` with other values under dotted keys."""
    config = deepcopy(config)
    for key, value in change.items():
        *path, name = key.split(".")
        node = config
        for part in path:
            node = getattr(node, part)
        setattr(node, name, value)
    return config


def is_possible(config: Config, world_size: int) -> bool:
    try:
        check(config, world_size, files=False)
    except ConfigError:
        return False
    return True


def show(change: Change) -> str:
    """As overrides."""
    return " ".join(
        f"{key}={'null' if value is None else str(value).lower().replace(' ', '')}"
        for key, value in change.items()
    )


def changes_that_fit(
    config: Config, world_size: int, text_width: int, gpu_bytes: float
) -> tuple[Change, float]:
    """The fewest changes, in the order of what they cost in speed, with which the run fits, and the GPU
    memory it then needs.

    Where nothing helps, all of the changes that save memory.
    """

    def need(change: Change) -> float:
        other = changed(config, change)
        return estimate(other, make_layout(other, 0, world_size), text_width).gpu_bytes

    change: Change = {}
    for key, value in _memory_levers(config):
        more = change | {key: value}
        if (
            need(change) > gpu_bytes
            and is_possible(changed(config, more), world_size)
            and need(more) < need(change)
        ):
            change = more
    for key in list(change):
        fewer = {k: v for k, v in change.items() if k != key}
        if need(fewer) <= gpu_bytes and is_possible(changed(config, fewer), world_size):
            change = fewer
    return change, need(change)


def _memory_levers(config: Config) -> list[tuple[str, Any]]:
    levers: list[tuple[str, Any]] = [
        ("residency", "swap"),
        ("actor.shard_size", None),
        ("actor.cfg", "sequential"),
        ("actor.activation_checkpointing", True),
    ]
    for _ in range(2):  # the rollout may hide behind the actor
        for key, size in (
            ("rollout.micro_batch_size", config.rollout.micro_batch_size),
            ("actor.micro_batch_size", config.actor.micro_batch_size),
        ):
            levers += [(key, size >> halvings) for halvings in range(1, size.bit_length())]
    if config.rollout.engine == "vllm_omni":
        levers += [("rollout.tensor_parallel_size", ranks) for ranks in (2, 4, 8)]
    return levers


def changes_that_divide(config: Config, world_size: int) -> list[Change]:
    """Ways to spread a step over that many ranks, where it cannot be as it is: more prompts, or replicas of
    several ranks.
    """
    found = []
    prompts = config.data.prompts_per_step
    for factor in range(2, 2 * world_size + 1):
        change = {"data.prompts_per_step": prompts * factor}
        if is_possible(changed(config, change), world_size):
            found.append(change)
            break
    if config.rollout.engine == "vllm_omni":
        degrees = [(cfg, ulysses) for ulysses in (1, 2, 4, 8) for cfg in (1, 2)]
        for cfg, ulysses in sorted(degrees, key=lambda pair: pair[0] * pair[1]):
            change = {"rollout.cfg_parallel_size": cfg, "rollout.ulysses_degree": ulysses}
            change = _fewer_in_a_micro_batch(
                config, {key: degree for key, degree in change.items() if degree > 1}, world_size
            )
            if is_possible(changed(config, change), world_size):
                found.append(change)
                break
    return found


def _fewer_in_a_micro_batch(config: Config, change: Change, world_size: int) -> Change:
    """The same with the actor's micro-batch cut to a rank's share of an update, where that is smaller."""
    other = changed(config, change)
    try:
        share = units_of_rank(other, make_layout(other, 0, world_size)) // config.actor.updates_per_step
    except ConfigError:  # no layout at all: `is_possible` will say so
        return change
    return change | {"actor.micro_batch_size": share} if 0 < share < config.actor.micro_batch_size else change
