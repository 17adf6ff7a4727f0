"""Classes that a setting names: ours by a short name, a user's as module:Class."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from dataclasses import is_dataclass
from pathlib import Path

from omnirl_hpc.config.schema import AlgorithmConfig, FlowGRPOConfig, OcrConfig, RewardPartConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.launch.runtime import forbid_downloads


def _families() -> dict[str, str]:
    """Each folder of omnirl_hpc.models with a spec: its class has the folder's name in CamelCase."""
    folder = Path(__file__).parent.parent / "models"
    names = sorted(spec.parent.name for spec in folder.glob("*/spec.py"))
    return {name: f"omnirl_hpc.models.{name}.family:{_camel_case(name)}" for name in names}


def _camel_case(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


# group of settings -> short name -> class
BUILT_IN = {
    "model": _families(),
    "algorithm": {"flow_grpo": "omnirl_hpc.algorithms.flow_grpo:FlowGRPO"},
    "reward": {
        "jpeg_compressibility": "omnirl_hpc.rewards.jpeg_compressibility:JpegCompressibility",
        "ocr": "omnirl_hpc.rewards.ocr:Ocr",
    },
}

# The settings of ours: the classes' attribute `Settings`, without importing them.
SETTINGS = {
    "algorithm": {"flow_grpo": FlowGRPOConfig},
    "reward": {"jpeg_compressibility": RewardPartConfig, "ocr": OcrConfig},
}

BASE_SETTINGS = {"algorithm": AlgorithmConfig, "reward": RewardPartConfig}

BASES = {
    "model": "omnirl_hpc.models.family:ModelFamily",
    "algorithm": "omnirl_hpc.algorithms.algorithm:Algorithm",
    "reward": "omnirl_hpc.rewards.reward:Reward",
}


def is_import_path(name: str) -> bool:
    return ":" in name


def find_class(group: str, name: str) -> type:
    """The class behind a name in a group of settings: a short name of ours, or module:Class.

    Modules are found where Python finds them, and in the working directory. Raises ConfigError where the
    class is not there, does not derive from the group's base class or leaves some of its methods or
    attributes out. Our own classes are imported only here, because most of them need torch.
    """
    path = name if is_import_path(name) else BUILT_IN[group].get(name)
    if path is None:
        raise ConfigError(
            f"{group}={name} is not known; it must be one of: {', '.join(BUILT_IN[group])}, or your own as module:Class"
        )
    module_name, _, class_name = path.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), class_name]):
        raise ConfigError(
            f"{group}={path}: a class of your own is written as module:Class, such as my_package.my_module:MyClass"
        )
    found = getattr(_import(group, path, module_name), class_name, None)
    if not inspect.isclass(found):
        raise ConfigError(f"{group}={path}: the module {module_name} has no class {class_name}")
    bases = {f"{base.__module__}:{base.__qualname__}": base for base in found.__mro__}
    if BASES[group] not in bases:
        raise ConfigError(
            f"{group}={path}: {class_name} does not derive from {BASES[group].replace(':', '.')}"
        )
    attributes = inspect.get_annotations(bases[BASES[group]])
    if missing := sorted(
        {*found.__abstractmethods__, *(name for name in attributes if not hasattr(found, name))}
    ):
        raise ConfigError(f"{group}={path}: {class_name} does not define {', '.join(missing)}")
    try:
        inspect.signature(found).bind("its settings")
    except TypeError as error:
        raise ConfigError(
            f"{group}={path}: {class_name} cannot be made from its settings alone: {error}"
        ) from None
    return found


def settings_class(group: str, name: str) -> type:
    """The dataclass of settings of an algorithm or a reward."""
    if not is_import_path(name):
        return SETTINGS[group][name]
    found, base = find_class(group, name).Settings, BASE_SETTINGS[group]
    if not (is_dataclass(found) and issubclass(found, base)):
        raise ConfigError(
            f"{group}={name}: its Settings must be a dataclass that derives from {base.__module__}.{base.__name__}"
        )
    return found


def _import(group: str, path: str, module_name: str):
    forbid_downloads()  # the module may import what reads that setting once
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # `python -m` looks there, the command `omnirl-hpc` does not
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{group}={path}: there is no module {error.name} on Python's path or in the working directory {os.getcwd()}"
            ) from None
        raise ConfigError(
            f"{group}={path}: {module_name} needs {error.name}, which is not installed"
        ) from None
    except SyntaxError as error:
        raise ConfigError(f"{group}={path} cannot be imported: SyntaxError: {error}") from None
    except Exception as error:  # a module of the user's own, which may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {' '.join(str(error).split())} ({Path(place.filename).name}, line {place.lineno})"
        raise ConfigError(f"{group}={path} cannot be imported: {said}") from None
