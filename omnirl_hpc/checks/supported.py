"""Is a checkpoint one that its family can train? Its configuration files against the family's statement."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omnirl_hpc.errors import DataError
from omnirl_hpc.models.spec import ANY, ComponentSpec, FamilySpec

CONFIG_FILES = ("config.json", "scheduler_config.json")
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")  # ORGANISATION/NAME on the hub
SNAPSHOTS = ("snapshots/*", "models--*/snapshots/*", "hub/models--*/snapshots/*")  # in the hub client's cache


def find_unsupported(folder: Path, spec: FamilySpec) -> list[str]:
    """What a family cannot train in a checkpoint in diffusers' layout: a phrase each, with file and setting.

    Raises DataError for a file that is not JSON.
    """
    index = _read_json(folder / "model_index.json")
    pipeline = index.get("_class_name")
    if pipeline not in spec.pipeline_classes:  # what follows from it would only repeat it
        return [f"model_index.json names the pipeline {pipeline}, not {_choices(spec.pipeline_classes)}"]
    return [
        problem
        for name, component in spec.components.items()
        for problem in _component_problems(folder, name, index.get(name), component)
    ]


def where_it_may_be(path: str) -> str:
    """What to write in place of a path without a model_index.json; "" where that is not known."""
    folder = Path(path)
    there = sorted(
        found for form in SNAPSHOTS for found in folder.glob(form) if (found / "model_index.json").is_file()
    )
    if there:
        return f"it belongs to the hub client's cache; set model.path to the snapshot {there[-1]}"
    if (folder.parent / "model_index.json").is_file():
        return f"the checkpoint is the folder above it: set model.path={folder.parent}"
    if not folder.exists() and REPOSITORY.fullmatch(path):
        return (
            "a name on the hub is fetched to a folder first: omnirl-hpc prefetch recipe=flowgrpo_qwen_image "
            f"model.repo={path} model.path=DIR"
        )
    return ""


def _component_problems(folder: Path, name: str, entry: Any, spec: ComponentSpec) -> Iterator[str]:
    in_index = entry[1] if isinstance(entry, list) and len(entry) == 2 else entry
    in_index = in_index or "nothing"
    if in_index not in spec.classes:
        yield f"model_index.json names {in_index} as {name}, not {_choices(spec.classes)}"
    for file in (folder / name / config for config in CONFIG_FILES):
        if not file.is_file():
            continue  # whether files are missing is a question of its own (model_files)
        settings = _read_json(file)
        shown = f"{name}/{file.name}"
        in_file = settings.get("_class_name", in_index)
        if in_file != in_index:
            yield f"{shown} is of {in_file}, model_index.json names {in_index}"
        elif in_index in spec.classes:
            yield from _setting_problems(shown, settings, spec)


def _setting_problems(shown: str, settings: dict[str, Any], spec: ComponentSpec) -> Iterator[str]:
    for key, value in settings.items():
        if key == "quantization_config" and value is not None:
            yield f"{shown} holds quantized weights (quantization_config): only weights in full are trained"
        elif spec.settings is None or key.startswith("_"):
            continue
        elif key not in spec.settings:
            if value not in (None, False):  # a later version's way to say that something is off
                yield f"{shown} sets {key}={json.dumps(value)}, which is not known"
        elif (accepted := spec.settings[key]) is not ANY and value not in accepted:
            choices = " or ".join(json.dumps(choice) for choice in accepted)
            yield f"{shown} sets {key}={json.dumps(value)}, not {choices}"


def _choices(names: tuple[str, ...]) -> str:
    return " or ".join(names)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error})") from None
    if not isinstance(values, dict):
        raise DataError(f"{file} holds {type(values).__name__}, not settings by name")
    return values
