"""From Hydra overrides to one checked `Config` object."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from omnirl_hpc.config.classes import (
    BASE_SETTINGS,
    MODULES,
    built_in,
    config_dir,
    is_import_path,
    settings_class,
)
from omnirl_hpc.config.quoting import literal, setting
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import ConfigError

# Overrides for a configuration that no run is made of: the settings that have no default.
NO_PATHS = ("run_dir=-", "model.path=-", "data.prompts=-")

# What belongs to a class that a setting names.
OF_A_CLASS = ("algorithm.", "reward.parts.")

# OmegaConf's words -> what a value must be
KINDS = {
    "converted to Integer": "a whole number",
    "converted to Float": "a number",
    "not a valid bool": "true or false",
    "is not a ListConfig": "a list, written [a,b]",
    "is not Optional": "given, not null",
}


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration and where it came from."""

    config: Config
    choices: dict[str, str]  # group -> chosen file, e.g. {"recipe": "flowgrpo_tiny"}
    overrides: list[str]

    def to_yaml(self) -> str:
        """The effective configuration, as it is stored with the run."""
        return OmegaConf.to_yaml(OmegaConf.create(_literal(asdict(self.config))))


def load_config(overrides: Sequence[str], unused: Sequence[str] = ()) -> LoadedConfig:
    """Compose `configs/train.yaml` with `overrides` (Hydra's syntax).

    unused: groups (algorithm, reward) whose classes are not imported; their settings are left out but for
    those that every class has. Without the algorithm's, torch is not imported.

    Raises ConfigError with one sentence: an unknown key (with the nearest valid one), a value of the wrong
    type, an unknown choice of a group, or a key without a value.
    """
    return _load("train", overrides, unused)


def load_run_config(file: Path, overrides: Sequence[str], unused: Sequence[str] = ()) -> LoadedConfig:
    """The settings stored with a run (`config.yaml`), with `overrides` on top; a setting newer than the run
    has its default.

    unused: as for `load_config`. A class of the user's own need not be here then.

    Raises ConfigError as `load_config` does, where `overrides` choose a file of a group, since the run has
    made its choices, and where a class of the user's own would come out of the run's folder.
    """
    try:
        saved: Any = OmegaConf.to_container(OmegaConf.load(file))
        named = [saved["algorithm"], *saved["reward"]["parts"].values()]
        if not all("name" in settings for settings in named):
            raise KeyError("name")
    except (
        OSError,
        YAMLError,
        OmegaConfBaseException,
        AttributeError,
        KeyError,
        TypeError,
        UnicodeDecodeError,
    ) as error:
        raise ConfigError(
            f"{file} does not hold the settings of a run: {' '.join(str(error).split())}"
        ) from None
    for override in overrides:
        key = override.split("=")[0].lstrip("+~")
        if (config_dir() / key).is_dir():
            raise ConfigError(
                f"{override}: the run has chosen its {key}; only values can be changed, "
                f"such as {key}.KEY=VALUE"
            )
    classes = [("model", saved.get("model", {}).get("family", "")), ("algorithm", saved["algorithm"]["name"])]
    classes += [("reward", part["name"]) for part in saved["reward"]["parts"].values()]
    for group, name in classes:
        if group not in unused:
            _refuse_code_of_run(group, name, file.parent)
    node = OmegaConf.create({"defaults": ["schema", "_self_"], **saved})
    ConfigStore.instance().store(name="saved_run", node=node)
    return _load("saved_run", overrides, unused)


def _load(name: str, overrides: Sequence[str], unused: Sequence[str]) -> LoadedConfig:
    ConfigStore.instance().store(name="schema", node=Config)
    try:
        _refuse_equal_parts(overrides)
        composed = _compose(name, [_of_a_class(override) for override in overrides])
    except HydraException as error:
        raise ConfigError(explain(error)) from None
    except YAMLError as error:
        raise ConfigError(f"a file of settings is not YAML: {' '.join(str(error).split())}") from None
    choices = {
        str(group): str(choice)
        for group, choice in composed.hydra.runtime.choices.items()
        if "/" not in str(group)
    }
    OmegaConf.set_struct(composed, False)
    del composed["hydra"]
    composed.algorithm = _typed("algorithm", composed.algorithm, "algorithm", unused)
    for part in composed.reward.parts:
        node = composed.reward.parts[part]
        composed.reward.parts[part] = _typed("reward", node, f"reward.parts.{part}", unused)
    _refuse_added_keys(composed)
    try:
        config = cast(Config, OmegaConf.to_object(composed))
    except MissingMandatoryValue as error:
        key = error.full_key
        raise ConfigError(f"{key} has no value: add {key}=… to the command line or to the recipe") from None
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from None
    return LoadedConfig(config, choices, list(overrides))


def _compose(name: str, overrides: list[str]) -> DictConfig:
    """Hydra's composition. A choice that is module:Class, in an override or a recipe, becomes one when Hydra
    misses it.
    """
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            return compose(name, overrides, return_hydra_config=True)
    except MissingConfigException as error:
        group, _, choice = (error.missing_cfg_file or "").partition("/")
        if group not in MODULES or not is_import_path(choice):
            raise
    node: dict[str, Any] = {"family" if group == "model" else "name": choice}
    if group == "reward":
        node = {"parts": {choice.rpartition(":")[2]: node}}
    ConfigStore.instance().store(group=group, name=choice, node=node)
    return _compose(name, overrides)


def _of_a_class(override: str) -> str:
    """Hydra composes the settings of classes without their types:
    it may then add what a file does not name.
    """
    return f"++{override}" if override.startswith(OF_A_CLASS) else override


def _typed(group: str, node: DictConfig, key: str, unused: Sequence[str]) -> DictConfig:
    """The settings at `key` in the type of the class that they name."""
    if "name" not in node:
        raise ConfigError(_unknown(key))
    if group in unused:
        known = {field.name for field in fields(BASE_SETTINGS[group])}
        kind, node = BASE_SETTINGS[group], OmegaConf.masked_copy(node, [k for k in node if k in known])
    else:
        kind = settings_class(group, node.name)
    try:
        typed = OmegaConf.structured(kind)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{group}={node.name}: its Settings cannot be used: {_first_line(error)}") from None
    try:
        return cast(DictConfig, OmegaConf.merge(typed, node))
    except ConfigKeyError as error:
        raise ConfigError(_unknown(f"{key}.{error.full_key}", _keys(typed, f"{key}."))) from None
    except OmegaConfBaseException as error:
        value = OmegaConf.select(node, str(error.full_key))
        raise ConfigError(f"{key}.{error.full_key}={_shown(value)}: {_why_not(str(error))}") from None


def _shown(value: object) -> str:
    return "null" if value is None else str(value)


def _refuse_equal_parts(overrides: Sequence[str]) -> None:
    """Parts of a reward are told apart by their class's name: of two with the same name the second would
    replace the first.
    """
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        value = override.value() if override.key_or_group == "reward" else None
        if isinstance(value, list):
            parts = [str(choice).rpartition(":")[2] for choice in value]
            if twice := sorted({part for part in parts if parts.count(part) > 1}):
                raise ConfigError(
                    f"reward={value} has several parts named {', '.join(twice)}: one of each name can be used"
                )


def valid_keys() -> list[str]:
    """Every key that holds a value, in dotted form, for suggestions;
    an algorithm's own are not among them.
    """
    keys = _keys(OmegaConf.structured(Config))
    for name in built_in("reward"):
        keys += _keys(OmegaConf.structured(settings_class("reward", name)), f"reward.parts.{name}.")
    return keys


def _literal(tree: Any) -> Any:
    """Settings whose text OmegaConf reads as it is."""
    if isinstance(tree, dict):
        return {key: _literal(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_literal(value) for value in tree]
    return literal(tree) if isinstance(tree, str) else tree


def _keys(config: DictConfig, prefix: str = "") -> list[str]:
    keys = []
    for name in config:
        if not OmegaConf.is_missing(config, name) and isinstance(config[name], DictConfig):
            keys += _keys(config[name], prefix + str(name) + ".")
        else:
            keys.append(prefix + str(name))
    return keys


def _refuse_added_keys(config: DictConfig, prefix: str = "") -> None:
    """Hydra lets `+key=value` add a key to a typed node, where nothing would ever read it."""
    kind = OmegaConf.get_type(config)
    known = {field.name for field in fields(kind)} if is_dataclass(kind) else set(config)
    for name in config:
        if name not in known:
            raise ConfigError(_unknown(prefix + str(name)))
        if not OmegaConf.is_missing(config, name) and isinstance(config[name], DictConfig):
            _refuse_added_keys(config[name], prefix + str(name) + ".")


def _refuse_code_of_run(group: str, name: str, run: Path) -> None:
    """A run may be another user's. Python looks for modules in the working directory, too."""
    if is_import_path(name) and Path.cwd().is_relative_to(run.resolve()):
        raise ConfigError(
            f"{group}={name}: {run} names a class that is not ours, and Python would take it from there: "
            "use another working directory"
        )


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _unknown(key: str, more: Sequence[str] = ()) -> str:
    """more: valid keys beside the usual ones."""
    if re.fullmatch(r"reward\.parts\.[^.]+", key):
        return f"{key} is not among the chosen rewards: choose them by reward=NAME or 'reward=[NAME,NAME]'"
    keys = [*valid_keys(), *more]
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    near = near or [k for k in keys if k.rpartition(".")[2] == key.rpartition(".")[2]][:1]
    return f"unknown setting {key}" + (f"; did you mean {near[0]}?" if near else "")


def _how_to_write(override: str) -> str:
    key, _, value = override.partition("=")
    if value.startswith("~"):
        return f"~ is not read as your home here; write {key}=$HOME{value[1:]}"
    if value and value[0] not in "[{" and not key.startswith("-"):
        return (
            "accented letters and any of ()[]{}=,:;#&~ need quotes that the shell leaves: "
            f"{shlex.quote(setting(key, value))}"
        )
    return "settings are written as key=value, in Hydra's syntax"


def _why_not(cause: str) -> str:
    """OmegaConf's words about a value, in ours."""
    for words, kind in KINDS.items():
        if words in cause:
            return f"the value must be {kind}"
    return cause.splitlines()[0]


def explain(error: HydraException) -> str:
    """Hydra's error as one sentence, with the nearest valid key where a key is unknown."""
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} cannot be read: {_how_to_write(error.override)}"
    if wrong := re.match(r"Error merging override (.*)", str(error)):
        return f"{wrong.group(1)}: {_why_not(str(error.__cause__))}"
    if isinstance(error, MissingConfigException) and "/" in (missing := error.missing_cfg_file or ""):
        group, _, choice = missing.partition("/")
        known = ", ".join(sorted(file.stem for file in (config_dir() / group).glob("*.yaml")))
        return f"{group}={choice} is not known; it must be one of: {known}"
    if several := re.match(r"Ambiguous value for argument '(.*)'", str(error)):
        return (
            f"{several.group(1)} names several values: a list is written [a,b], a sweep is for omnirl-hpc "
            "sweep, and other commas need quotes that the shell leaves: 'key=\"a,b\"'"
        )
    text = "\n".join(str(e) for e in (error, error.__cause__) if e is not None)
    file = re.match(
        r"In '([^']+)': \w+ raised while composing config:", text
    )  # the wrong line stands in a file
    place = f"configs/{file.group(1)}.yaml: " if file else ""
    key = re.search(r"full_key: (\S+)", text) or re.search(r"Could not override '([^']+)'", text)
    if key and re.search(r"Key '[^']+' (?:is )?not in|Could not override", text):
        return place + _unknown(key.group(1))
    lines = [line for line in text.strip().splitlines() if not line.startswith(" ")]
    if file:
        return f"{place}{key.group(1) if key else ''}: {lines[1]}"
    return " ".join(dict.fromkeys(lines))
