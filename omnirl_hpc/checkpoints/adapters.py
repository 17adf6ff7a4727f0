"""LoRA adapters as folders: PEFT's format, which checkpoints have, and diffusers', which pipelines load.

Torch is imported only where tensors are read or written.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError, safe_open

from omnirl_hpc.checkpoints.files import (
    find_checkpoint,
    follow_umask,
    read_state,
    whole_steps,
    write_text,
)
from omnirl_hpc.errors import CheckpointError, ConfigError
from omnirl_hpc.policies import CURRENT, EMA, policy_of

if TYPE_CHECKING:
    from torch import Tensor

    from omnirl_hpc.config.schema import LoraConfig

CONFIG_FILE = "adapter_config.json"
PEFT_FILE, PEFT_PREFIX = "adapter_model.safetensors", "base_model.model."
DIFFUSERS_FILE, DIFFUSERS_PREFIX = "pytorch_lora_weights.safetensors", "transformer."
DIFFUSERS_METADATA = (
    "lora_adapter_metadata"  # in the file's header: PEFT's settings as JSON, each under DIFFUSERS_PREFIX
)
OTHER_NETWORK = re.compile(r"transformer_\d+\.")  # as pipelines with several call them
SUFFIXES = (".lora_A.weight", ".lora_B.weight")
NOT_AN_ADAPTER = f"it has neither {PEFT_FILE} nor {DIFFUSERS_FILE}"
NEEDED = ("r", "lora_alpha", "target_modules")
NOT_APPLIED = (
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
)  # they change what an adapter computes

Step = int | Literal["best"]  # whose checkpoint: after so many steps, or the one kept as the best


def adapter_file(path: Path) -> Path | None:
    """The file with the tensors, which `path` is or which lies in that folder; None where there is none."""
    if path.suffix == ".safetensors" and path.is_file():
        return path
    return next((path / name for name in (PEFT_FILE, DIFFUSERS_FILE) if (path / name).is_file()), None)


def step_or_best(text: str) -> Step:
    """The value of the option --step."""
    return "best" if text == "best" else int(text)


def find_run_adapters(checkpoints: Path, step: Step | None) -> tuple[int, dict[str, Path]]:
    """The adapters in the checkpoint that `find_run_checkpoint` finds: (step, policy -> folder), the current
    one last. Raises as that does.
    """
    step, path = find_run_checkpoint(checkpoints, step)
    try:
        inside = sorted(
            path.iterdir()
        )  # not `glob`, which takes a folder that is closed to us for an empty one
    except FileNotFoundError:
        raise _gone(path) from None
    folders = {policy_of(folder.name): folder for folder in inside if (folder / PEFT_FILE).is_file()}
    return step, {policy: folders[policy] for policy in sorted(folders, key=lambda p: (p == CURRENT, p))}


def find_run_adapter(checkpoints: Path, step: Step | None, policy: str = CURRENT) -> tuple[int, Path]:
    """One of them: (step, folder). Raises ConfigError for a policy that the run does not keep."""
    step, folders = find_run_adapters(checkpoints, step)
    if policy not in folders:
        path = find_run_checkpoint(checkpoints, step)[1]
        hint = ": the run was made without actor.ema_decay" if policy == EMA else ""
        raise ConfigError(f"{path} has no adapter of the policy {policy}{hint}; it has: {', '.join(folders)}")
    return step, folders[policy]


def find_run_checkpoint(checkpoints: Path, step: Step | None) -> tuple[int, Path]:
    """The checkpoint of `step` ("best": the one kept as such), else the newest whole one: (step, folder).

    Raises ConfigError where the one asked for is not there, CheckpointError where there is none at all.
    """
    if step == "best":
        if not (checkpoints / "best").is_file():
            raise ConfigError(
                f"--step best: {checkpoints} has none: a run that sets evaluation.every "
                "(and not evaluation.keep_best=false) has one "
                f"after its first evaluation; whole steps: {whole_steps(checkpoints)}"
            )
        step = int((checkpoints / "best").read_text().removeprefix("step_"))
    path = find_checkpoint(checkpoints, step, setting="--step ")
    if path is None:
        raise CheckpointError(f"{checkpoints} has no whole checkpoint")
    try:
        return read_state(path)["step"], path
    except FileNotFoundError:
        raise _gone(path) from None


def _gone(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} was deleted meanwhile, as a run does with its oldest checkpoints (checkpoint.keep): "
        "try again"
    )


def read_adapter_config(path: Path, assumed: LoraConfig | None = None) -> dict[str, Any]:
    """PEFT's settings of an adapter, a folder or a file: `r`, `lora_alpha`, `target_modules`, …

    assumed: of an adapter that comes without settings, as other trainers write them. Raises ConfigError
    where they are missing or cannot be read, and for an adapter that is more than plain LoRA;
    CheckpointError for a folder that is gone.
    """
    file = adapter_file(path)
    if file is None:
        if not path.exists():
            raise _gone(path)
        raise ConfigError(f"{path} is not an adapter: {NOT_AN_ADAPTER}")
    try:
        ranks, settings = _ranks(file), _stored_settings(file)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"the adapter {file} cannot be read: {type(error).__name__}: {error}") from None
    if settings is None:
        if assumed is None:
            raise ConfigError(f"{file} does not say its rank and alpha")
        (rank, *others) = sorted(set(ranks.values()))
        settings = {"r": rank, "lora_alpha": assumed.alpha, "target_modules": sorted(ranks)}
        settings |= {"rank_pattern": others} if others else {}
    if missing := [name for name in NEEDED if name not in settings]:
        raise ConfigError(f"the settings of the adapter {file} lack {', '.join(missing)}")
    if not_applied := [name for name in NOT_APPLIED if settings.get(name)]:
        raise ConfigError(
            f"the adapter {file} has {', '.join(not_applied)}: only plain LoRA, scaled by alpha / r, "
            "can be used"
        )
    return settings


def _ranks(file: Path) -> dict[str, int]:
    """The rank of each module that an adapter's file adapts. Raises ConfigError for what is no LoRA of PEFT's
    names.
    """
    with safe_open(file, framework="np") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}
    if unknown := sorted(name for name in shapes if not name.endswith(SUFFIXES)):
        raise ConfigError(
            f"{file} has {unknown[0]}: an adapter's tensors are named *{' and *'.join(SUFFIXES)}"
        )
    if not shapes:
        raise ConfigError(f"{file} is empty")
    first = SUFFIXES[0]
    return {
        _own_name(name).removesuffix(first): shape[0]
        for name, shape in shapes.items()
        if name.endswith(first)
    }


def _stored_settings(file: Path) -> dict[str, Any] | None:
    """Of adapter_config.json beside the file, else of its header; None where neither has any."""
    beside = file.with_name(CONFIG_FILE)
    if file.name == PEFT_FILE or (file.name == DIFFUSERS_FILE and beside.is_file()):
        return json.loads(beside.read_text())
    with safe_open(file, framework="np") as opened:
        header = opened.metadata() or {}
    if DIFFUSERS_METADATA not in header:
        return None
    settings = json.loads(header[DIFFUSERS_METADATA])
    return {name.removeprefix(DIFFUSERS_PREFIX): value for name, value in settings.items()}


def _own_name(name: str) -> str:
    return name.removeprefix(PEFT_PREFIX).removeprefix(DIFFUSERS_PREFIX)


def _diffusers_name(name: str) -> str:
    """Each module below its network; the first's are below none here (models/experts.py)."""
    return name if OTHER_NETWORK.match(name) else DIFFUSERS_PREFIX + name


def load_adapter(folder: Path) -> dict[str, Tensor]:
    """The LoRA of an adapter, a folder or a file, under this package's names.

    Raises CheckpointError for a folder without an adapter and for a file that is not safetensors.
    """
    from safetensors.torch import load_file

    if not folder.exists():
        raise _gone(folder)
    path = adapter_file(folder)
    if path is None:
        raise CheckpointError(f"{folder} is not an adapter: {NOT_AN_ADAPTER}")
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise _gone(path) from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return {_own_name(name): tensor for name, tensor in tensors.items()}


def load_adapter_scaled(path: Path, config: LoraConfig) -> dict[str, Tensor]:
    """The LoRA of an adapter whose own alpha may be another, so that it does the same at `config`'s alpha."""
    settings = read_adapter_config(path, assumed=config)
    return scale(load_adapter(path), settings["lora_alpha"] / settings["r"] / (config.alpha / config.rank))


def scale(lora: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    """A LoRA that does `factor` times as much; exact where that is a power of two."""
    return {name: tensor * factor if ".lora_B." in name else tensor for name, tensor in lora.items()}


def save_adapter(folder: Path, lora: dict[str, Tensor], peft_config: dict[str, Any]) -> None:
    """A PEFT adapter folder."""
    _save(folder, PEFT_FILE, {PEFT_PREFIX + name: tensor for name, tensor in lora.items()}, peft_config)


def save_diffusers_adapter(folder: Path, lora: dict[str, Tensor], peft_config: dict[str, Any]) -> None:
    """A folder for `pipeline.load_lora_weights`, as diffusers' own `save_lora_weights` writes it.

    alpha / r is multiplied into B, and alpha is r then: whoever reads the tensors alone has the whole
    strength. Exact where alpha / r is a power of two.
    """
    lora = scale(lora, peft_config["lora_alpha"] / peft_config["r"])
    peft_config = peft_config | {"lora_alpha": peft_config["r"]}
    settings = {DIFFUSERS_PREFIX + name: value for name, value in peft_config.items()}
    metadata = {"format": "pt", DIFFUSERS_METADATA: json.dumps(settings, indent=2, sort_keys=True)}
    tensors = {_diffusers_name(name): tensor for name, tensor in lora.items()}
    _save(folder, DIFFUSERS_FILE, tensors, peft_config, metadata)


def _save(
    folder: Path,
    name: str,
    tensors: dict[str, Tensor],
    peft_config: dict[str, Any],
    metadata: dict[str, str] | None = None,
) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, folder / name, metadata)
    write_text(folder / CONFIG_FILE, json.dumps(peft_config, indent=1))
    follow_umask(folder)
