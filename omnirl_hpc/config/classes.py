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
from typing import Any

from omnirl_hpc.config.schema import AlgorithmConfig, RewardPartConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.launch.runtime import forbid_downloads

# group of settings -> the module that holds the class of a short name
MODULES = {
    "model": "omnirl_hpc.models.{}.family",
    "algorithm": "omnirl_hpc.algorithms.{}",
    "reward": "omnirl_hpc.rewards.{}",
}

BASE_SETTINGS = {"algorithm": AlgorithmConfig, "reward": RewardPartConfig}

BASES = {
    "model": "omnirl_hpc.models.family:ModelFamily",
    "algorithm": "omnirl_hpc.algorithms.algorithm:Algorithm",
    "reward": "omnirl_hpc.rewards.reward:Reward",
}


def is_import_path(name: str) -> bool:
    return ":" in name


def config_dir() -> Path:
    """The folder of YAML files: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "train.yaml").is_file():
            return folder
    raise ConfigError(
        f"the installation is incomplete: no configs/train.yaml in {package} or beside it; install again"
    )


def built_in(group: str) -> list[str]:
    """The short names of a group: each has a file of that name in configs/GROUP."""
    return sorted(file.stem for file in (config_dir() / group).glob("*.yaml"))


def find_class(group: str, name: str) -> type[Any]:
    """The class behind a name in a group of settings: a short name of ours, or module:Class.

    A short name is that of a file, which holds one class of its group. Modules of a user's own are found
    where Python finds them, and in the working directory. Raises ConfigError where the class is not there,
    does not derive from the group's base class or leaves some of its methods or attributes out. Classes are
    imported only here: those of models and algorithms bring torch with them.
    """
    if is_import_path(name):
        module_name, _, class_name = name.partition(":")
        if not all(part.isidentifier() for part in [*module_name.split("."), class_name]):
            raise ConfigError(
                f"{group}={name}: a class of your own is written as module:Class, "
                "such as my_package.my_module:MyClass"
            )
        attribute = getattr(_import(group, name, module_name), class_name, None)
        if not inspect.isclass(attribute):
            raise ConfigError(f"{group}={name}: the module {module_name} has no class {class_name}")
        found: type[Any] = attribute
    else:
        found = _class_in_file(group, name)
    bases = _names_of_bases(found)
    if BASES[group] not in bases:
        raise ConfigError(
            f"{group}={name}: {found.__name__} does not derive from {BASES[group].replace(':', '.')}"
        )
    attributes = inspect.get_annotations(bases[BASES[group]])
    if missing := sorted(
        {*found.__abstractmethods__, *(name for name in attributes if not hasattr(found, name))}
    ):
        raise ConfigError(f"{group}={name}: {found.__name__} does not define {', '.join(missing)}")
    try:
        inspect.signature(found).bind("its settings")
    except TypeError as error:
        raise ConfigError(
            f"{group}={name}: {found.__name__} cannot be made from its settings alone: {error}"
        ) from None
    return found


def settings_class(group: str, name: str) -> type:
    """The dataclass of settings of an algorithm or a reward: the attribute `Settings` of its class."""
    found, base = find_class(group, name).Settings, BASE_SETTINGS[group]
    if not (inspect.isclass(found) and is_dataclass(found) and issubclass(found, base)):
        raise ConfigError(
            f"{group}={name}: its Settings must be a dataclass that derives from "
            f"{base.__module__}.{base.__name__}"
        )
    return found


def _class_in_file(group: str, name: str) -> type[Any]:
    if name not in built_in(group):
        raise ConfigError(
            f"{group}={name} is not known; it must be one of: {', '.join(built_in(group))}, "
            "or your own as module:Class"
        )
    module = _import(group, name, MODULES[group].format(name))
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    (found,) = [value for value in own if inspect.isclass(value) and BASES[group] in _names_of_bases(value)]
    return found


def _names_of_bases(found: type) -> dict[str, type]:
    return {f"{base.__module__}:{base.__qualname__}": base for base in found.__mro__}


def _import(group: str, path: str, module_name: str):
    forbid_downloads()  # the module may import what reads that setting once
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # `python -m` looks there, the command `omnirl-hpc` does not
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{group}={path}: there is no module {error.name} on Python's path or in the working "
                f"directory {os.getcwd()}"
            ) from None
        raise ConfigError(
            f"{group}={path}: {module_name} needs {error.name}, which is not installed"
        ) from None
    except SyntaxError as error:
        raise ConfigError(f"{group}={path} cannot be imported: SyntaxError: {error}") from None
    except (Exception, SystemExit) as error:  # a module of the user's own, which may do anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = (
            f"{type(error).__name__}: {' '.join(str(error).split())} ({Path(place.filename).name}, "
            f"line {place.lineno})"
        )
        raise ConfigError(f"{group}={path} cannot be imported: {said}") from None
