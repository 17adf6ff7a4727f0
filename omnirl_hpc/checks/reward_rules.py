"""The rules about rewards."""

from __future__ import annotations

import math

from omnirl_hpc.checks.require import require_class
from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import one_of, require
from omnirl_hpc.models.spec import find_spec
from omnirl_hpc.rewards.reward import DEVICE, LATENTS, PLACES, Reward


def rewards_are_known(config: Config, world_size: int) -> None:
    for name, part in config.reward.parts.items():
        require_class("reward", f"reward.parts.{name}.name", part.name)


def rewards_get_what_they_need(config: Config, world_size: int) -> None:
    spec = find_spec(config.model.family)
    for name, part in config.reward.parts.items():
        for need in find_class("reward", part.name).needs:
            require(
                need in (*spec.makes, LATENTS),
                f"reward.parts.{name}.name={part.name} needs {need}, and model.family={config.model.family} "
                f"makes {' and '.join(spec.makes)}",
            )


def rewards_run_somewhere(config: Config, world_size: int) -> None:
    for name, part in config.reward.parts.items():
        found = find_class("reward", part.name)
        one_of(f"reward.parts.{name}.name={part.name}: runs_in", found.runs_in, PLACES)
        if found.runs_in != DEVICE:
            continue
        require(
            found.modules is not Reward.modules,
            f"reward.parts.{name}.name={part.name}: runs_in={DEVICE}, and it does not define modules(), the "
            "networks that are moved there",
        )
        require(
            part.workers == 1,
            f"reward.parts.{name}.workers={part.workers}: {part.name} runs on the device of each rank, where "
            f"there is one of it; set reward.parts.{name}.workers=1",
        )
        require(
            config.residency != "auto",
            f"residency=auto: no plan knows what memory reward.parts.{name}.name={part.name} takes on the "
            "device; set residency=swap, or residency=resident where all fits",
        )


def reward_fraction_is_valid(config: Config, world_size: int) -> None:
    value = config.reward.max_failed_fraction
    require(0 <= value < 1, f"reward.max_failed_fraction={value} must be in [0, 1)")


def reward_parts_are_valid(config: Config, world_size: int) -> None:
    parts = config.reward.parts
    require(
        bool(parts), "reward.parts is empty: choose one by reward=NAME, or several by 'reward=[NAME,NAME]'"
    )
    for name, part in parts.items():
        key = f"reward.parts.{name}"
        require(
            math.isfinite(part.weight) and part.weight != 0,
            f"{key}.weight={part.weight} must be a number other than 0",
        )
