"""Where the modules of an actor's adapter are in the engine, whose layers are partly fused and renamed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

# diffusers keeps the output projection in a list with a dropout; vllm-omni keeps the projection alone.
_RENAMED = (re.compile(r"(^|\.)to_out\.0$"), r"\1to_out")


@dataclass(frozen=True)
class Place:
    """A layer of the engine and, where the layer is fused of several projections, which of them."""

    layer: str
    part: int = 0


def engine_name(name: str) -> str:
    """The engine's name of a module (or of a target suffix) of diffusers' transformer."""
    return _RENAMED[0].sub(_RENAMED[1], name)


def fused_parts(stacked_params_mapping: Iterable[Sequence[str]]) -> dict[str, tuple[str, int]]:
    """{"to_q": ("to_qkv", 0), "to_k": ("to_qkv", 1), …}: from the map that a vllm-omni transformer loads its
    weights with.
    """
    parts: dict[str, tuple[str, int]] = {}
    members: dict[str, int] = {}
    for fused, single, *_ in stacked_params_mapping:
        fused, single = fused.strip("."), single.strip(".")
        parts[single] = (fused, members.setdefault(fused, 0))
        members[fused] += 1
    return parts


def find_places(
    modules: Iterable[str], layers: Collection[str], parts: dict[str, tuple[str, int]]
) -> dict[str, Place]:
    """The place of each of the actor's `modules` among the engine's `layers`. A module that the engine lacks
    is left out.
    """
    places = {}
    for module in modules:
        name = engine_name(module)
        prefix, dot, leaf = name.rpartition(".")
        if name in layers:
            places[module] = Place(name)
        elif leaf in parts and prefix + dot + parts[leaf][0] in layers:
            places[module] = Place(prefix + dot + parts[leaf][0], parts[leaf][1])
    return places
