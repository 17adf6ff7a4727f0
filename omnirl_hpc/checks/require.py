"""How a rule refuses."""

from __future__ import annotations

from omnirl_hpc.config.classes import BUILT_IN, find_class, is_import_path, settings_class
from omnirl_hpc.config.schema import AlgorithmConfig, RewardPartConfig
from omnirl_hpc.errors import ConfigError


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with `message` where the condition does not hold."""
    if not condition:
        raise ConfigError(message)


def one_of(key: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ConfigError naming the choices where `value` is none of them."""
    shown = ", ".join("null" if a is None else str(a) for a in allowed)
    require(value in allowed, f"{key}={value} is not known; it must be one of: {shown}")


def require_class(group: str, key: str, name: str) -> None:
    """Raise ConfigError where there is no such class. One of the user's own is imported for this; ours are
    not.
    """
    if is_import_path(name):
        find_class(group, name)
    else:
        one_of(key, name, (*BUILT_IN[group], "your own as module:Class"))


def require_settings(group: str, key: str, settings: AlgorithmConfig | RewardPartConfig) -> None:
    """Raise ConfigError where `settings` are not of the class that they name."""
    require(
        isinstance(settings, settings_class(group, settings.name)),
        f"{key}={settings.name} has other settings than {type(settings).__name__}: choose it by {group}={settings.name}",
    )
