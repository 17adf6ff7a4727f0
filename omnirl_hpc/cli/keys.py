"""Keys of a command of its own (nodes=4), among the overrides that it passes on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

from omnirl_hpc.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Request = TypeVar("Request", bound="DataclassInstance")


def split_keys(
    arguments: Iterable[str], request: Request, may_be_zero: tuple[str, ...] = ()
) -> tuple[Request, list[str]]:
    """Set the fields of the dataclass `request` that `arguments` name; returns it and all other arguments.

    Raises ConfigError where a field that is a number gets something else, and for a key that is nearly a
    field.
    """
    known = {field.name: field for field in fields(request)}
    overrides = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in known:
            if near := difflib.get_close_matches(key, known, n=1, cutoff=0.8):
                raise ConfigError(f"unknown setting {key}; did you mean {near[0]}?")
            overrides.append(argument)
        elif isinstance(known[key].default, int):
            if not value.isdecimal() or (int(value) == 0 and key not in may_be_zero):
                raise ConfigError(f"{key}={value} must be a whole number greater than 0")
            setattr(request, key, int(value))
        else:
            setattr(request, key, value)
    return request, overrides
