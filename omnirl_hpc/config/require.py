"""How a rule refuses."""

from __future__ import annotations

from omnirl_hpc.errors import ConfigError


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with `message` where the condition does not hold."""
    if not condition:
        raise ConfigError(message)


def one_of(key: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ConfigError naming the choices where `value` is none of them."""
    shown = ", ".join("null" if a is None else str(a) for a in allowed)
    require(value in allowed, f"{key}={value} is not known; it must be one of: {shown}")
