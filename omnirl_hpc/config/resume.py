"""Which settings may differ when a run goes on from a checkpoint."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from omnirl_hpc.config.schema import Config, FlowGRPOConfig
from omnirl_hpc.errors import ConfigError

# Where things are, how work is spread, what is written down, how long a run is. Everything else decides results.
# An entry is a key, or a group of keys where it ends in a dot.
MAY_CHANGE = (
    "run_dir",
    "steps",
    "residency",
    "timeout_seconds",
    "stop_before",
    "init_adapter",
    "model.path",
    "model.repo",
    "data.prompts",
    "rollout.tensor_parallel_size",
    "rollout.ulysses_degree",
    "rollout.cfg_parallel_size",
    "rollout.embedding_cache_size",
    "rollout.max_log_prob_gap",
    "actor.shard_size",
    "actor.activation_checkpointing",
    "reward.workers",
    "reward.timeout_seconds",
    "checkpoint.",
    "evaluation.",
    "logging.",
)


def check_same_run(saved_yaml: str, current_yaml: str, where: str) -> None:
    """Raise ConfigError naming every setting in which a command differs from the run it would go on with."""
    saved, current = (flatten(OmegaConf.to_container(OmegaConf.create(text))) for text in (saved_yaml, current_yaml))
    defaults = flatten(OmegaConf.to_container(OmegaConf.structured(Config(algorithm=FlowGRPOConfig()))))
    saved = {key: value for key, value in defaults.items() if key in current} | saved  # settings that are newer than the run
    different = [
        f"{key}={_show(current.get(key))} (the run has {_show(saved.get(key))})"
        for key in sorted(saved.keys() | current.keys())
        if saved.get(key) != current.get(key) and not _may_change(key)
    ]
    if different:
        raise ConfigError(
            f"run_dir={where} holds a run with other settings: {'; '.join(different)}. Take its settings, or another run_dir"
        )


def _may_change(key: str) -> bool:
    return any(key.startswith(entry) if entry.endswith(".") else key == entry for entry in MAY_CHANGE)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    if not isinstance(tree, dict):
        return {prefix.rstrip("."): tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.")
    return flat


def _show(value: Any) -> str:
    return "null" if value is None else str(value)
