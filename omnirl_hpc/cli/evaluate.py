"""`omnirl-hpc evaluate RUN OUT`: one rank of an evaluation of a run's adapter, or of any other."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omnirl_hpc.checkpoints.adapters import (
    Step,
    adapter_file,
    find_run_adapters,
    load_adapter,
    read_adapter_config,
    step_or_best,
)
from omnirl_hpc.checks.data import check_prompt_lengths, check_prompts
from omnirl_hpc.checks.rules import check
from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.load import load_config, load_run_config
from omnirl_hpc.config.schema import Config, LoraConfig
from omnirl_hpc.determinism import enable_strict
from omnirl_hpc.errors import CheckpointError, ConfigError, OmniRLError
from omnirl_hpc.launch.identity import Identity, find_identity
from omnirl_hpc.launch.reporting import rank_0_reports_first
from omnirl_hpc.launch.runtime import prepare_process
from omnirl_hpc.layout import make_layout
from omnirl_hpc.policies import CURRENT, REFERENCE, label
from omnirl_hpc.rollout.vllm_omni import versions
from omnirl_hpc.run_directory import RunDirectory


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "omnirl-hpc evaluate",
        description="Images of fixed prompts by the base model and with an adapter, side by side and scored: "
        "a table, a picture and all images in the folder OUT. Runs on one rank or, with torchrun or srun, on "
        "several. May be used while the run "
        "goes on.",
    )
    parser.add_argument(
        "source", type=Path, metavar="RUN", help="a run's folder, or an adapter's (then give recipe=… too)"
    )
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="a folder; what is there already is not made again"
    )
    parser.add_argument(
        "--step", type=step_or_best, metavar="N", help="the checkpoint of this step, or `best`"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="settings, such as evaluation.num_prompts=64",
    )
    options = parser.parse_intermixed_args(arguments)
    identity = find_identity()
    with rank_0_reports_first(identity):
        if adapter_file(options.source) is not None:
            if options.step is not None:
                raise ConfigError(f"--step {options.step} is for a run; {options.source} is an adapter")
            config, step, adapters = (
                load_config(["run_dir=.", *options.overrides], unused=("algorithm",)).config,
                0,
                {CURRENT: options.source},
            )
        else:
            config, step, adapters = of_run(options.source, options.step, options.overrides)
        prepare(config, adapters[CURRENT], identity)
        make_folder(options.out)
    evaluate(config, step, adapters, options.out, identity)


def of_run(path: Path, step: Step | None, overrides: list[str]) -> tuple[Config, int, dict[str, Path]]:
    """Settings, step, and the folder of each policy's adapter in a run's checkpoint."""
    run_directory = RunDirectory(path)
    run_directory.require_run()
    config = load_run_config(run_directory.config, overrides, unused=("algorithm",)).config
    if config.actor.train == "full":
        raise ConfigError(
            f"{path} trains all weights, and evaluate compares adapters: omnirl-hpc export writes its "
            "transformer"
        )
    return config, *find_run_adapters(run_directory.checkpoints, step)


def prepare(config: Config, adapter: Path, identity: Identity) -> None:
    """Turn the settings of a training run into those of an evaluation, and check them."""
    lora = read_adapter_config(adapter, assumed=config.actor.lora)
    if not isinstance(lora["target_modules"], list):
        raise ConfigError(f"the adapter in {adapter} names its modules by a pattern; a list is needed")
    config.actor.lora = LoraConfig(
        lora["r"], lora["lora_alpha"], lora["target_modules"], config.actor.lora.dtype
    )
    # There is no actor.
    config.residency, config.actor.shard_size, config.actor.compile = "resident", None, False
    config.evaluation.every = 1  # this is one: the rules for it count
    config.evaluation.prompts = config.data.prompts = config.evaluation.prompts or config.data.prompts
    check(config, identity.world_size, trains=False)
    if config.rollout.engine == "vllm_omni":
        versions.require()
    check_prompts(config)


def make_folder(out: Path) -> None:
    """Raises ConfigError for a folder that cannot be written to, or that holds something else than
    evaluations.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        inside = [path.name for path in out.iterdir()]
    except OSError as error:
        raise ConfigError(f"{out} cannot be made: {error.strerror}") from None
    if inside and "base" not in inside:
        raise ConfigError(f"{out} exists and holds something else than evaluations")
    if not os.access(out, os.W_OK):
        raise ConfigError(f"{out} cannot be written to")


def evaluate(config: Config, step: int, adapters: dict[str, Path], out: Path, identity: Identity) -> None:
    """Form the process group, build an engine without an actor, compare the base and the adapters."""
    if config.determinism == "strict":
        enable_strict()
    with rank_0_reports_first(identity):
        prepare_process(config.threads_per_rank, identity.local_rank)
    from omnirl_hpc.launch.groups import pick_device, process_group
    from omnirl_hpc.launch.rendezvous import Rendezvous

    device = pick_device(identity)
    with process_group(Rendezvous(identity, config.timeout_seconds, f"evaluation in {out}"), device):
        try:
            step, adapters = as_rank_0_found(step, adapters)
            compare(config, step, adapters, out, identity, device)
        except OmniRLError as error:
            raise type(error)(f"{identity}: {error}") from None
    if identity.rank == 0:
        place = out / f"step_{step:06d}"
        print((place / "comparison.md").read_text(), end="")
        print(f"side by side: {place / 'comparison.jpg'}", flush=True)


def as_rank_0_found(step: int, adapters: dict[str, Path]) -> tuple[int, dict[str, Path]]:
    """One checkpoint for all ranks: the run may have written another one while they looked. Collective."""
    import torch.distributed as dist

    found: list[Any] = [step, adapters]
    dist.broadcast_object_list(found, src=0)
    return found[0], found[1]


def compare(
    config: Config, step: int, adapters: dict[str, Path], out: Path, identity: Identity, device: Any
) -> None:
    import torch

    from omnirl_hpc.evaluation.evaluator import Evaluator, on_host, without_effect
    from omnirl_hpc.launch.agreement import raise_on_all_ranks
    from omnirl_hpc.metrics.memory import DevicePeaks
    from omnirl_hpc.metrics.phases import PhaseTimer
    from omnirl_hpc.residency import Residency
    from omnirl_hpc.rollout.fitting import fit_micro_batch_size
    from omnirl_hpc.sources.generation import Generation

    layout = make_layout(config, identity.rank, identity.world_size)
    dtype = getattr(torch, config.rollout.dtype)
    loras = raise_on_all_ranks(
        lambda: {label(policy): on_host(load_adapter(folder), dtype) for policy, folder in adapters.items()},
        CheckpointError,
    )
    family = find_class("model", config.model.family)(config.model)
    check_prompt_lengths(config, family)
    timer = PhaseTimer(device)
    residency = Residency(config.residency, timer, DevicePeaks(device))
    generation = Generation(config, family, layout, device, timer, residency)
    try:
        generation.load()
        evaluator = Evaluator(config, family, layout, device, generation, out)
        if device.type == "cuda":
            longest = config.data.text_lengths[-1]
            fit_micro_batch_size(generation.engine, evaluator.requests(), longest, device, may_shrink=True)
        base = {label(REFERENCE): without_effect(loras[label(CURRENT)])}
        evaluator.compare(base | loras, step, check_stop=lambda: None)
        generation.leave()
    finally:
        generation.close()
