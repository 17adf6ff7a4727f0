"""What a model family states about itself, as data: rules and plans read it before torch is imported."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omnirl_hpc.config.classes import MODULES, find_class, is_import_path

# Setting of a component -> the values that the family can train with; ANY: whatever the file says.
Settings = Mapping[str, tuple[Any, ...] | None]
ANY = None


@dataclass(frozen=True)
class ComponentSpec:
    """What one component of a checkpoint may be: a folder with a configuration file in diffusers' layout."""

    classes: tuple[str, ...]  # names in diffusers or transformers
    # Every setting that the component's file may have. None: the class decides, whatever its settings.
    settings: Settings | None = None


@dataclass(frozen=True)
class FamilySpec:
    """The checkpoints that a family can train. Everything else is refused by name before weights load."""

    title: str  # for messages
    pipeline_classes: tuple[str, ...]  # model_index.json's _class_name
    components: Mapping[str, ComponentSpec]  # by the name of their folder


def find_spec(family: str) -> FamilySpec:
    """What a family of ours states (torch is not imported), or one of the user's own as module:Class."""
    if is_import_path(family):
        return find_class("model", family).spec
    folder, _, _ = MODULES["model"].format(family).rpartition(".")
    return importlib.import_module(f"{folder}.spec").SPEC
