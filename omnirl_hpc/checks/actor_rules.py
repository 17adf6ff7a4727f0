"""The rules about what is trained, and how."""

from __future__ import annotations

import math

from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import require


def optimizer_is_valid(config: Config, world_size: int) -> None:
    optimizer = config.actor.optimizer
    for key in ("lr", "eps", "max_grad_norm"):
        value = getattr(optimizer, key)
        require(
            value > 0 and math.isfinite(value), f"actor.optimizer.{key}={value} must be a positive number"
        )
    for key in ("weight_decay", "warmup_updates"):
        value = getattr(optimizer, key)
        require(value >= 0, f"actor.optimizer.{key}={value} must not be negative")
    require(
        len(optimizer.betas) == 2 and all(0 <= b < 1 for b in optimizer.betas),
        f"actor.optimizer.betas={list(optimizer.betas)} must be two numbers in [0, 1)",
    )


def ema_decay_is_valid(config: Config, world_size: int) -> None:
    decay = config.actor.ema_decay
    require(
        decay is None or 0 < decay < 1, f"actor.ema_decay={decay} must be between 0 and 1, or null for none"
    )


def full_training_is_possible(config: Config, world_size: int) -> None:
    if config.actor.adapter is not None:
        return
    for key, value, off, why in (
        ("actor.ema_decay", config.actor.ema_decay, None, "a running mean is kept of an adapter alone"),
        (
            "evaluation.every",
            config.evaluation.every,
            0,
            "the base that it compares with is the model without its adapter",
        ),
        (
            "init_adapter",
            config.init_adapter,
            None,
            "there is no adapter to start from; merge it into model.path first",
        ),
    ):
        require(
            value == off,
            f"{key}={value} is not for actor.train=full: {why}. Set {key}={'null' if off is None else off}, "
            "or actor.train=lora",
        )
