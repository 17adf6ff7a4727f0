"""LoRA adapters as folders: PEFT's format, which checkpoints have, and diffusers', which pipelines load.

Torch is imported only where tensors are read or written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from omnirl_hpc.checkpoints.files import find_checkpoint, read_state, whole_steps, write_text
from omnirl_hpc.errors import CheckpointError, ConfigError
from omnirl_hpc.policies import CURRENT, EMA, policy_of

if TYPE_CHECKING:
    from torch import Tensor

PEFT_FILE, PEFT_PREFIX = "adapter_model.safetensors", "base_model.model."
DIFFUSERS_FILE, DIFFUSERS_PREFIX = "pytorch_lora_weights.safetensors", "transformer."
DIFFUSERS_METADATA = (
    "lora_adapter_metadata"  # in the file's header: PEFT's settings as JSON, each under DIFFUSERS_PREFIX
)
NEEDED = ("r", "lora_alpha", "target_modules")
NOT_APPLIED = (
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
)  # they change what an adapter computes


def adapter_file(folder: Path) -> Path | None:
    """The file with the tensors; None where the folder is no adapter."""
    return next((folder / name for name in (PEFT_FILE, DIFFUSERS_FILE) if (folder / name).is_file()), None)


def step_or_best(text: str) -> int | str:
    """The value of the option --step."""
    return text if text == "best" else int(text)


def find_run_adapters(checkpoints: Path, step: int | str | None) -> tuple[int, dict[str, Path]]:
    """The adapters in the checkpoint that `find_run_checkpoint` finds: (step, policy -> folder), the current
    one last. Raises as that does.
    """
    step, path = find_run_checkpoint(checkpoints, step)
    folders = {policy_of(file.parent.name): file.parent for file in sorted(path.glob(f"*/{PEFT_FILE}"))}
    return step, {policy: folders[policy] for policy in sorted(folders, key=lambda p: (p == CURRENT, p))}


def find_run_adapter(checkpoints: Path, step: int | str | None, policy: str = CURRENT) -> tuple[int, Path]:
    """One of them: (step, folder). Raises ConfigError for a policy that the run does not keep."""
    step, folders = find_run_adapters(checkpoints, step)
    if policy not in folders:
        path = find_run_checkpoint(checkpoints, step)[1]
        hint = ": the run was made without actor.ema_decay" if policy == EMA else ""
        raise ConfigError(f"{path} has no adapter of the policy {policy}{hint}; it has: {', '.join(folders)}")
    return step, folders[policy]


def find_run_checkpoint(checkpoints: Path, step: int | str | None) -> tuple[int, Path]:
    """The checkpoint of `step` ("best": the one kept as such), else the newest whole one: (step, folder).

    Raises ConfigError where the one asked for is not there, CheckpointError where there is none at all.
    """
    if step == "best":
        if not (checkpoints / "best").is_file():
            raise ConfigError(
                f"--step best: {checkpoints} has none: a run that sets evaluation.every (and not evaluation.keep_best=false) has one "
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
        f"{path} was deleted meanwhile, as a run does with its oldest checkpoints (checkpoint.keep): try again"
    )


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """PEFT's settings of an adapter: `r`, `lora_alpha`, `target_modules`, …

    Raises CheckpointError where they are missing or cannot be read, and for an adapter that is more than
    plain LoRA.
    """
    if not folder.is_dir():
        raise _gone(folder)
    try:
        if (folder / PEFT_FILE).is_file():
            settings = json.loads((folder / "adapter_config.json").read_text())
        else:
            with safe_open(folder / DIFFUSERS_FILE, framework="np") as file:
                settings = json.loads((file.metadata() or {})[DIFFUSERS_METADATA])
    except KeyError:
        raise CheckpointError(f"{folder / DIFFUSERS_FILE} does not say its rank and alpha") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the settings of the adapter in {folder} cannot be read: {error}") from None
    settings = {name.removeprefix(DIFFUSERS_PREFIX): value for name, value in settings.items()}
    if missing := [name for name in NEEDED if name not in settings]:
        raise CheckpointError(f"the settings of the adapter in {folder} lack {', '.join(missing)}")
    if others := [name for name in NOT_APPLIED if settings.get(name)]:
        raise CheckpointError(
            f"the adapter in {folder} has {', '.join(others)}: only plain LoRA, scaled by alpha / r, can be used"
        )
    return settings


def load_adapter(folder: Path) -> dict[str, Tensor]:
    """The LoRA of an adapter folder, under this package's names.

    Raises CheckpointError for a folder without an adapter and for a file that is not safetensors.
    """
    from safetensors.torch import load_file

    path = adapter_file(folder)
    if not folder.is_dir():
        raise _gone(folder)
    if path is None:
        raise CheckpointError(f"{folder} is not an adapter: it has neither {PEFT_FILE} nor {DIFFUSERS_FILE}")
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise _gone(path) from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return {
        name.removeprefix(PEFT_PREFIX).removeprefix(DIFFUSERS_PREFIX): tensor
        for name, tensor in tensors.items()
    }


def save_adapter(folder: Path, lora: dict[str, Tensor], peft_config: dict[str, Any]) -> None:
    """A PEFT adapter folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {PEFT_PREFIX + name: tensor.cpu().contiguous() for name, tensor in lora.items()}, folder / PEFT_FILE
    )
    write_text(folder / "adapter_config.json", json.dumps(peft_config, indent=1))


def save_diffusers_adapter(folder: Path, lora: dict[str, Tensor], peft_config: dict[str, Any]) -> None:
    """A folder for `pipeline.load_lora_weights`, as diffusers' own `save_lora_weights` writes it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    settings = {DIFFUSERS_PREFIX + name: value for name, value in peft_config.items()}
    save_file(
        {DIFFUSERS_PREFIX + name: tensor.cpu().contiguous() for name, tensor in lora.items()},
        folder / DIFFUSERS_FILE,
        metadata={"format": "pt", DIFFUSERS_METADATA: json.dumps(settings, indent=2, sort_keys=True)},
    )
