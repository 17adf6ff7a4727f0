"""The rules between settings and what is on this node: files, packages, a compiler. One function for each, as
in rules.py.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from omnirl_hpc.checkpoints.files import checkpoint_path, steps_in
from omnirl_hpc.checks.require import require_adapter
from omnirl_hpc.checks.supported import find_unsupported, where_it_may_be
from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import one_of, require
from omnirl_hpc.installation import is_installed
from omnirl_hpc.models.spec import find_spec
from omnirl_hpc.policies import is_checkpoint

TRACKERS = ("tensorboard", "wandb", "trackio")


def compiler_is_there(config: Config, world_size: int) -> None:
    asked = [
        key
        for key, value in (
            ("rollout.compile", config.rollout.compile),
            ("actor.compile", config.actor.compile),
        )
        if value
    ]
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    require(
        not asked or compiler is not None,
        f"{' and '.join(asked)}: torch.compile needs a C compiler, and there is no gcc or clang here: "
        f"load one (module load gcc), set CC, or set {' and '.join(f'{key}=false' for key in asked)}",
    )


def reward_packages_are_installed(config: Config, world_size: int) -> None:
    for name, part in config.reward.parts.items():
        missing = [
            package for package in find_class("reward", part.name).packages if not is_installed(package)
        ]
        require(
            not missing,
            f"reward.parts.{name}: {part.name} needs {', '.join(missing)}, not installed: "
            f"pip install {' '.join(missing)}",
        )


def paths_exist(config: Config, world_size: int) -> None:
    files = {"evaluation.prompts": config.evaluation.prompts, "data.prompts": config.data.prompts}
    folders = {
        "run_dir": config.run_dir,
        "model.path": config.model.path,
        "init_adapter": config.init_adapter,
    }
    for key, value in (files | folders).items():
        require(value is None or bool(value.strip()), f"{key} is empty: a shell variable that is not set?")
        require(
            value is None or not value.startswith("~"),
            f"{key}={value}: ~ is not read as your home here; write $HOME",
        )
    model = Path(config.model.path)
    hint = where_it_may_be(config.model.path)
    require(
        (model / "model_index.json").is_file(),
        f"model.path={model} is not a diffusers checkpoint: {model / 'model_index.json'} does not exist"
        + (f"; {hint}" if hint else ""),
    )
    mixed = (Path(config.run_dir) / "model_index.json").exists()
    require(not mixed, f"run_dir={config.run_dir} holds a model: a run needs a folder of its own")
    for key, value in files.items():
        require(value is None or Path(value).exists(), f"{key}={value} does not exist")
        require(
            value is None or Path(value).is_file(),
            f"{key}={value} is a folder, not a file; omnirl-hpc prompts OUT.parquet --from {value} makes one "
            "table of its parquet files",
        )


def model_is_supported(config: Config, world_size: int) -> None:
    family = find_spec(config.model.family)
    require(
        not (problems := find_unsupported(Path(config.model.path), family)),
        f"model.path={config.model.path} is not a checkpoint that model.family={config.model.family} "
        f"({family.title}) can train: {'; '.join(problems)}",
    )


def init_adapter_fits(config: Config, world_size: int) -> None:
    if config.init_adapter is not None:
        require_adapter("init_adapter", config.init_adapter, config.actor.lora)


def given_policies_fit(config: Config, world_size: int) -> None:
    """Needs the algorithm's file."""
    for policy, path in find_class("algorithm", config.algorithm.name)(config).given.items():
        key = f"algorithm.{policy}"
        if is_checkpoint(path):
            problems = find_unsupported(Path(path), find_spec(config.model.family))
            require(
                not problems,
                f"{key}={path} is not a checkpoint of model.family={config.model.family}: "
                f"{'; '.join(problems)}",
            )
            continue
        require(
            config.actor.adapter is not None,
            f"{key}={path} is an adapter, and actor.train=full has none: give a checkpoint with it in its "
            "weights (omnirl-hpc export --merge), or set actor.train=lora",
        )
        require_adapter(key, path, config.actor.lora)


def trackers_are_installed(config: Config, world_size: int) -> None:
    for name in config.logging.trackers:
        one_of("logging.trackers", name, TRACKERS)
        require(
            is_installed(name),
            f"logging.trackers={list(config.logging.trackers)}: {name} is not installed; "
            f"pip install '.[{name}]', or drop it",
        )


def step_to_resume_is_there(config: Config, world_size: int) -> None:
    step, folder = config.checkpoint.resume_step, Path(config.run_dir) / "checkpoints"
    if step is None:
        return
    there = [checkpoint_path(folder, step).name for step in steps_in(folder)]
    require(
        f"step_{step:06d}" in there,
        f"checkpoint.resume_step={step}: there is no such checkpoint in {folder}; "
        f"it has: {', '.join(there) or 'none'}",
    )


NODE_RULES = (
    compiler_is_there,
    reward_packages_are_installed,
    paths_exist,
    model_is_supported,
    init_adapter_fits,
    given_policies_fit,
    trackers_are_installed,
    step_to_resume_is_there,
)
