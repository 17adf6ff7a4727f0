"""Where the modules of an actor's adapter are in the engine, whose layers are partly fused and renamed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

# vllm-omni keeps some of diffusers' lists as single layers: the projection out of attention without its
# dropout, and the layers of a feed-forward network.
_RENAMED = ((re.compile(r"(^|\.)to_out\.0$"), r"\1to_out"), (re.compile(r"\.net\.(\d+)(?=\.|$)"), r".net_\1"))


@dataclass(frozen=True)
class Place:
    """A layer of the engine and, where the layer is fused of several projections, which of them."""

    layer: str
    part: int = 0


def engine_names(name: str) -> Iterator[str]:
    """What a module (or a target suffix) of diffusers' transformer may be called in the engine: the name
    itself first, since some of the engine's models keep the lists.
    """
    yield name
    for pattern, renamed in _RENAMED:
        if pattern.search(name):
            yield pattern.sub(renamed, name)


def fused_parts(stacked_params_mapping: Iterable[Sequence[str]]) -> dict[str, tuple[str, int]]:
    """{"to_q": ("to_qkv", 0), "to_k": ("to_qkv", 1), …}: from the map that a vllm-omni transformer loads its
    weights with. Names may have several parts ("attn1.to_q").
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
    found = ((module, _find_place(module, layers, parts)) for module in modules)
    return {module: place for module, place in found if place is not None}


def _find_place(module: str, layers: Collection[str], parts: dict[str, tuple[str, int]]) -> Place | None:
    for name in engine_names(module):
        if name in layers:
            return Place(name)
        words = name.split(".")
        for first in range(len(words)):  # the longest suffix decides
            fused, part = parts.get(".".join(words[first:]), (None, 0))
            layer = ".".join([*words[:first], str(fused)])
            if fused is not None and layer in layers:
                return Place(layer, part)
    return None
