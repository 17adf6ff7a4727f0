"""`omnirl-hpc export RUN OUT`: what a run has trained for plain diffusers: an adapter, or a whole
transformer.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omnirl_hpc.checkpoints.adapters import (
    find_run_adapter,
    find_run_checkpoint,
    load_adapter,
    read_adapter_config,
    save_diffusers_adapter,
    step_or_best,
)
from omnirl_hpc.checkpoints.files import follow_umask
from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.load import load_run_config
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.policies import CURRENT
from omnirl_hpc.run_directory import RunDirectory


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "omnirl-hpc export",
        description="Write the adapter of a run's newest whole checkpoint to the folder OUT, which "
        "diffusers' pipeline.load_lora_weights(OUT) loads; of a run that trains all weights, "
        "the transformer. May be used while the run goes on.",
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument(
        "--step", type=step_or_best, metavar="N", help="the checkpoint of this step, or `best`"
    )
    parser.add_argument(
        "--policy",
        default=CURRENT,
        metavar="NAME",
        help=(
            "another policy that the run keeps: ema (actor.ema_decay), or one of its algorithm's, such as old"
        ),
    )
    parser.add_argument(
        "--merge", action="store_true", help="add it to the weights and write the whole transformer"
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="the model, where it is needed and not at the run's model.path any more",
    )
    options = parser.parse_args(arguments)
    run_directory = RunDirectory(options.run)
    run_directory.require_run()
    model = [f"model.path={options.model}"] if options.model else []
    config = load_run_config(run_directory.config, model, unused=("algorithm", "reward")).config
    full = config.actor.adapter is None
    if full and (options.merge or options.policy != CURRENT):
        option = "--merge" if options.merge else f"--policy {options.policy}"
        raise ConfigError(f"{option} is for adapters, and {options.run} trains all weights: drop it")
    if (full or options.merge) and not (Path(config.model.path) / "transformer").is_dir():
        needing = "--merge" if options.merge else "a run that trains all weights"
        raise ConfigError(
            f"{needing} needs the model, and model.path={config.model.path} is none: "
            "say where it is with --model"
        )
    if options.out.exists():
        raise ConfigError(f"{options.out} exists: delete it or choose another name")
    if full:
        export_weights(run_directory, options.out, config, options.step)
    else:
        export_adapter(run_directory, options.out, config, options.step, options.policy, options.merge)


def export_adapter(
    run_directory: RunDirectory, out: Path, config: Config, step: int | None, policy: str, merge: bool
) -> None:
    step, folder = find_run_adapter(run_directory.checkpoints, step, policy)
    lora, settings = load_adapter(folder), read_adapter_config(folder)
    with whole_folder(out) as partial:
        if merge:
            write_merged(partial, config, lora)
        else:
            save_diffusers_adapter(partial, lora, settings)
    what = f"adapter of the policy {policy} after {step} steps"
    use = (
        f"transformer=….from_pretrained({str(out)!r})"
        if merge
        else f"pipeline.load_lora_weights({str(out)!r})"
    )
    print(f"wrote the {what}{', merged into the transformer' if merge else ''}: {use}")


def export_weights(run_directory: RunDirectory, out: Path, config: Config, step: int | None) -> None:
    step, checkpoint = find_run_checkpoint(run_directory.checkpoints, step)
    _, networks = load_base(config)
    from omnirl_hpc.checkpoints.checkpointer import load_weights

    load_weights(checkpoint, networks)
    with whole_folder(out) as partial:
        write_networks(partial, networks)
    print(f"wrote the transformer after {step} steps: transformer=….from_pretrained({str(out)!r})")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` when all went well and is gone otherwise."""
    partial = out.with_name(out.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_merged(out: Path, config: Config, lora: dict[str, Any]) -> None:
    """The transformer with the adapter added to its weights, in diffusers' layout."""
    family, networks = load_base(config)
    from omnirl_hpc.models.lora import merge_lora

    targets = config.actor.lora.target_modules or family.spec.lora_targets
    merge_lora(networks, config.actor.lora, targets, lora)
    write_networks(out, networks)


def write_networks(out: Path, networks: dict[str, Any]) -> None:
    """In diffusers' layout: one as it is, several in folders of their names."""
    for name, network in networks.items():
        network.save_pretrained(out if len(networks) == 1 else out / name)
    follow_umask(out)


def load_base(config: Config) -> tuple[Any, dict[str, Any]]:
    """The model family, and its denoising networks as the run started from them, in the engine's dtype."""
    from omnirl_hpc.launch.runtime import prepare_process

    prepare_process(config.threads_per_rank)
    import torch

    family = find_class("model", config.model.family)(config.model)
    dtype = getattr(torch, config.rollout.dtype)
    return family, {name: family.load_transformer(dtype, name) for name in family.spec.experts}
