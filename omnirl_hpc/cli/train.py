"""`omnirl-hpc train …`: one rank of a training run."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from omnirl_hpc.checks.data import check_pairs, check_prompts
from omnirl_hpc.checks.rules import check
from omnirl_hpc.config import schema
from omnirl_hpc.config.classes import config_dir
from omnirl_hpc.config.load import LoadedConfig, load_config
from omnirl_hpc.config.schema import Config
from omnirl_hpc.determinism import enable_strict
from omnirl_hpc.errors import ConfigError, OmniRLError
from omnirl_hpc.launch.identity import Identity, find_identity
from omnirl_hpc.launch.lock import RunLock
from omnirl_hpc.launch.reporting import rank_0_reports_first
from omnirl_hpc.launch.runtime import prepare_process
from omnirl_hpc.launch.stop import StopFlag, StopReason
from omnirl_hpc.launch.time_limit import job_end_time
from omnirl_hpc.layout import Layout, make_layout
from omnirl_hpc.metrics.progress import print_choices
from omnirl_hpc.models.spec import actor_numerics
from omnirl_hpc.planning.estimate import builds_engine, find_algorithm
from omnirl_hpc.report.page import write_report
from omnirl_hpc.report.records import RunRecords, describe_rewards
from omnirl_hpc.rollout.vllm_omni import versions
from omnirl_hpc.run_directory import RunDirectory

log = logging.getLogger(__name__)

USAGE = """usage: omnirl-hpc train recipe=NAME run_dir=DIR model.path=DIR data.prompts=FILE [KEY=VALUE …]

Trains one rank of a run; torchrun, srun or mpirun starts as many as there are GPUs (docs/slurm.md). \
The same command goes on with
a run that was stopped. Settings are Hydra overrides: \
steps=100 actor.optimizer.lr=1e-4 data.text_lengths=[64,128]; a recipe sets
them too, the command line wins. run_dir/config.yaml holds what came of it.

Choices, one file each in {configs}:
{groups}

Every key with its type, default and meaning: {schema}
"""


def run(overrides: Sequence[str]) -> None:
    """Check everything that can be checked without torch, then train. Every rank checks; rank 0 speaks
    first.
    """
    if "-h" in overrides or "--help" in overrides:
        print(usage())
        return
    identity = find_identity()
    with rank_0_reports_first(identity):
        known = load_as_started(overrides, unused=("algorithm",))  # in seconds, without torch
        config = known.config
        check(config, identity.world_size, algorithm=False)
        if config.rollout.engine == "vllm_omni":
            versions.require()
        lock = RunLock(config.run_dir, identity)
        run_directory = RunDirectory(config.run_dir, lock.require)
        run_directory.check_same_run(known.to_yaml(), unused=("algorithm",))
        check_prompts(config)
        lock.check()
        deadline = find_deadline(config.stop_before, identity)
    stop = StopFlag(run_directory.path, deadline=deadline)
    stop.install()  # before torch is imported, which takes seconds in which signals are real
    with rank_0_reports_first(identity):
        if config.determinism == "strict":
            enable_strict()
        prepare_process(config.threads_per_rank, identity.local_rank)
        loaded = load_as_started(overrides)
        check(loaded.config, identity.world_size)
        check_pairs(loaded.config)
        run_directory.check_same_run(loaded.to_yaml())
        run_directory.create()
    try:
        if identity.rank == 0:
            lock.acquire()
            run_directory.check_same_run(loaded.to_yaml())  # other runs may have come and gone meanwhile
        train(loaded, identity, run_directory, stop, lock)
        if identity.rank == 0:
            write_last_words(run_directory)
    finally:
        lock.release()


def load_as_started(overrides: Sequence[str], unused: Sequence[str] = ()) -> LoadedConfig:
    """The settings. A job goes back to `checkpoint.resume_step` once: requeued, it goes on where it was."""
    loaded = load_config(overrides, unused)
    checkpoint, job = loaded.config.checkpoint, os.environ.get("SLURM_JOB_ID", "")
    run_directory = RunDirectory(loaded.config.run_dir)
    if checkpoint.resume_step is not None and run_directory.has_returned(job, checkpoint.resume_step):
        checkpoint.resume_step = None
    return loaded


def usage() -> str:
    folder = config_dir()
    groups = {
        group.name: sorted(file.stem for file in group.glob("*.yaml"))
        for group in sorted(folder.iterdir())
        if group.is_dir()
    }
    lines = [f"  {group}={' | '.join(choices)}" for group, choices in groups.items()]
    return USAGE.format(configs=folder, groups="\n".join(lines), schema=schema.__file__)


def find_deadline(stop_before: float, identity: Identity) -> float | None:
    """When to stop by itself. Rank 0 alone looks at the clock, and asks Slurm once for the whole job.

    Raises ConfigError where that is now: each start of a job that is requeued would be over at once.
    """
    if not stop_before or identity.rank != 0:
        return None
    end = job_end_time(os.environ)
    if end is None:
        return None
    left = end - time.time()
    if stop_before >= left:
        raise ConfigError(
            f"stop_before={stop_before:g}, and the job ends in {left:.0f} s, which leaves no time to train: "
            "choose a longer --time or a smaller stop_before"
        )
    return end - stop_before


def train(
    loaded: LoadedConfig, identity: Identity, run_directory: RunDirectory, stop: StopFlag, lock: RunLock
) -> None:
    """Form the process group, build the trainer, run all steps that are left."""
    config = loaded.config
    from omnirl_hpc.checkpoints.checkpointer import Checkpointer
    from omnirl_hpc.checkpoints.run_state import find_start
    from omnirl_hpc.checks.preflight.findings import WARNING
    from omnirl_hpc.checks.preflight.network import QUICK_SIZES
    from omnirl_hpc.checks.preflight.preflight import checked_process_group
    from omnirl_hpc.launch.agreement import gather, raise_on_all_ranks
    from omnirl_hpc.launch.groups import pick_device
    from omnirl_hpc.metrics.phases import PhaseTimer
    from omnirl_hpc.metrics.trackers import Trackers
    from omnirl_hpc.residency import settle_residency
    from omnirl_hpc.rollout.batching import describe_padding
    from omnirl_hpc.trainer import Trainer

    layout = make_layout(config, identity.rank, identity.world_size)
    device = pick_device(identity)
    timer = PhaseTimer(device)
    run_directory.log_to_file(identity.rank, identity.world_size)
    with ExitStack() as stack:
        with rank_0_reports_first(identity):
            findings = stack.enter_context(checked_process_group(config, identity, device, QUICK_SIZES))
            lock.token = gather(lock.token)[0]  # all write under rank 0's
            why = settle_residency(config, layout, device) if config.residency == "auto" else ""
            checkpointer = Checkpointer(
                run_directory.checkpoints,
                config.checkpoint,
                identity.rank,
                config.timeout_seconds,
                run_directory.require_lock,
            )
            start = find_start(run_directory, checkpointer)
        if identity.rank == 0:
            for finding in findings:
                level = logging.WARNING if finding.level == WARNING else logging.INFO
                log.log(level, "preflight, %s: %s", finding.check, finding.text)
            choices = describe_choices(config, layout, identity, str(device))
            choices["residency"] += f" (auto: {why})" if why else ""
            if builds_engine(config) and (padded := describe_padding(config, layout)):
                log.warning("%s", padded)
            run_directory.write_start(loaded.to_yaml(), loaded.choices | choices)
            print_choices({"recipe": loaded.choices["recipe"], **choices})
        with rank_0_reports_first(identity):
            trackers = raise_on_all_ranks(
                lambda: stack.enter_context(Trackers(config, run_directory, identity.rank)), ConfigError
            )
        trainer = None
        try:
            trainer = Trainer(loaded, layout, device, run_directory, timer, stop, trackers, checkpointer)
            reason = trainer.train(start)
            # not after an error: taking leave of ranks that are stuck would only delay the end
            trainer.leave()
        except OmniRLError as error:
            raise type(error)(f"{identity}, phase {timer.current}: {error}") from None
        except (
            Exception
        ) as error:  # whatever it is: only the place is added to the log, and it goes on as it came
            log.error("%s failed in phase %s", identity, timer.current, exc_info=error)
            raise
        finally:
            if trainer is not None:
                trainer.close()
    if identity.rank == 0:
        lock.require()
        stop.acknowledge(reason)
        print(ENDINGS[reason].format(run_dir=run_directory.path), flush=True)


def write_last_words(run_directory: RunDirectory) -> None:
    """The report of a run that ended well, and what came of its reward. A report that cannot be written fails
    no run.
    """
    records = replace(RunRecords.read(run_directory.path), holder=None, running=False)  # that was this run
    try:
        print(f"report: {write_report(records)}")
    except OSError as error:
        log.warning("the report was not written: %s", error)
    print(describe_rewards(records), flush=True)


ENDINGS = {
    StopReason.NONE: "done: results are in {run_dir}",
    StopReason.USER: "stopped: everything is saved in {run_dir}; the same command goes on from there",
    StopReason.TERM: (
        "stopped by SIGTERM: everything is saved in {run_dir}; the same command goes on from there"
    ),
    StopReason.REQUEUE: (
        "stopped for the system: everything is saved in {run_dir}; the same command goes on from there"
    ),
}


OF_AN_ENGINE = ("rollout", "sampling", "reward")  # what means nothing where none is built


def describe_choices(config: Config, layout: Layout, identity: Identity, device: str) -> dict[str, str]:
    """Everything that is chosen for the user or that decides numerics, for the table at the start."""
    sampling, actor, window = config.sampling, config.actor, config.sampling.window
    guidance = "batched" if actor_numerics(config).batched_cfg else "sequential"
    choices = {
        "launcher": identity.launcher,
        "device": device,
        "layout": layout.describe(),
        "residency": config.residency,
        "determinism": config.determinism,
        "rollout": f"{config.rollout.engine}, {config.rollout.dtype}, "
        f"micro-batch {config.rollout.micro_batch_size}"
        + (describe_vllm_omni(config) if config.rollout.engine == "vllm_omni" else ""),
        "actor": f"FSDP2, {describe_trained(config)}, micro-batch {actor.micro_batch_size}, "
        f"guidance {guidance}, activation checkpointing {'on' if actor.activation_checkpointing else 'off'}",
        "attention": (f"rollout {config.rollout.attention}, " if builds_engine(config) else "")
        + f"actor {actor.attention} (the kernels that run are named in the first step)",
        "sampling": f"{sampling.transition}, noise level {sampling.noise_level}, "
        f"{sampling.num_inference_steps} steps, CFG {sampling.true_cfg_scale}, "
        f"window {window.size} per {window.per}",
        "algorithm": f"{config.algorithm.name}, "
        f"old_log_prob={getattr(config.algorithm, 'old_log_prob', '-')}",
        "reward": " + ".join(f"{part.weight:g} x {name}" for name, part in config.reward.parts.items()),
        "step": f"{describe_step(config)}, {actor.updates_per_step} update(s)",
    }
    unused = () if builds_engine(config) else OF_AN_ENGINE
    return {name: choice for name, choice in choices.items() if name not in unused}


def describe_step(config: Config) -> str:
    data = config.data
    if find_algorithm(config).source != "rollout":
        return f"{data.prompts_per_step} pairs of a table"
    images = data.prompts_per_step * data.samples_per_prompt
    return f"{data.prompts_per_step} prompts x {data.samples_per_prompt} samples = {images} images"


def describe_trained(config: Config) -> str:
    actor = config.actor
    if actor.adapter is None:
        return f"all weights float32, computed in {actor.dtype}"
    return f"base {actor.dtype}, LoRA r={actor.adapter.rank} {actor.adapter.dtype}"


def describe_vllm_omni(config: Config) -> str:
    rollout = config.rollout
    asleep = f", awake {' and '.join(rollout.awake)}" if rollout.awake and config.residency == "swap" else ""
    lora = "" if config.actor.adapter is None else f", LoRA {rollout.lora}"
    return f" ({versions.installed()}){lora}, {'compiled' if rollout.compile else 'eager'}{asleep}"
