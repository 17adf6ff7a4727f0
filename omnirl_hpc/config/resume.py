"""Which settings may differ when a run goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import OmegaConf

from omnirl_hpc.config.classes import BASE_SETTINGS, is_import_path, settings_class
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import ConfigError

# Where things are, how work is spread, what is written down, how long a run is. Everything else decides
# results. An entry is a key, or a pattern of keys.
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
    "reward.parts.*.workers",
    "reward.parts.*.timeout_seconds",
    "checkpoint.*",
    "evaluation.*",
    "logging.*",
)


# As above, of some algorithms only.
MAY_CHANGE_WHERE_THEY_ARE = ("algorithm.teacher",)

# Values that mean the same: how guidance is computed was written out before families said what engines do.
SAME = {"actor.cfg": {None, "sequential"}}


def check_same_run(saved_yaml: str, current_yaml: str, where: str, unused: Sequence[str] = ()) -> None:
    """Raise ConfigError naming every setting in which a command differs from the run it would go on with.

    unused: groups whose classes `current_yaml` was loaded without; of theirs only the names are compared.
    """
    saved, current = (
        {
            key: value
            for key, value in flatten(OmegaConf.to_container(OmegaConf.create(text))).items()
            if key.partition(".")[0] not in unused or key.endswith(".name")
        }
        for text in (saved_yaml, current_yaml)
    )
    newer = _defaults(current, unused)  # settings newer than the run
    saved = {key: value for key, value in newer.items() if key in current} | saved
    different = [
        f"{key}={_show(current.get(key))} (the run has {_show(saved.get(key))})"
        for key in sorted(saved.keys() | current.keys())
        if not _may_change(key) and not _means_the_same(key, saved.get(key), current.get(key))
    ]
    if different:
        raise ConfigError(
            f"run_dir={where} holds a run with other settings: {'; '.join(different)}. Take its settings, "
            "or another run_dir"
        )


def _means_the_same(key: str, saved: Any, current: Any) -> bool:
    return saved == current or (key in SAME and {saved, current} <= SAME[key])


def _may_change(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in (*MAY_CHANGE, *MAY_CHANGE_WHERE_THEY_ARE))


def _defaults(settings: dict[str, Any], unused: Sequence[str]) -> dict[str, Any]:
    """The defaults of all settings but a user's own, for the algorithm and the rewards that `settings`
    names.
    """
    defaults = flatten(OmegaConf.to_container(OmegaConf.structured(Config)))
    for key, name in settings.items():
        group, _, last = key.rpartition(".")
        kind = group.partition(".")[0]
        if last == "name" and kind in BASE_SETTINGS.keys() - set(unused) and not is_import_path(name):
            settings = OmegaConf.structured(settings_class(kind, name))
            defaults |= flatten(OmegaConf.to_container(settings), f"{group}.")
    return defaults


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
