"""`omnirl-hpc submit …`: a job script for Slurm made from settings, checked on the login node, and submitted.

For people who would rather not edit a script: what is submitted is sbatch/common.sh with a header, and
--dry-run prints it.
"""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from omnirl_hpc.checks.data import check_prompts
from omnirl_hpc.checks.rules import check
from omnirl_hpc.cli.keys import split_keys
from omnirl_hpc.config.load import load_config
from omnirl_hpc.errors import ConfigError, one_of, require

LAUNCHERS = ("srun", "torchrun", "pmix", "mpirun")  # as in sbatch/common.sh
USAGE = """\
usage: omnirl-hpc submit [--dry-run] recipe=NAME run_dir=DIR model.path=DIR data.prompts=FILE [KEY=VALUE …]

Keys of the job, beside the overrides that `train` takes (what is empty is left out of the script):
"""


@dataclass
class Request:
    """What is asked of Slurm. Keys of the command line, with their defaults."""

    nodes: int = 1
    ranks_per_node: int = 4
    gpus_per_node: str = "ranks_per_node"  # a number, TYPE:NUMBER, or 0 for CPU nodes
    cpus_per_task: int = 8
    time: str = "24:00:00"
    warning: int = 300  # seconds before the time limit at which the run is told to save
    chain: int = (
        1  # jobs one after the other, for runs that are longer than the limit where requeue is not allowed
    )
    job_name: str = ""  # the recipe
    account: str = ""
    partition: str = ""
    constraint: str = ""
    launcher: str = "srun"
    container: str = ""
    binds: str = ""
    python: str = ""  # the one that submits; in a container its own


def run(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE + "\n".join(f"  {field.name}={field.default}" for field in fields(Request)))
        return
    dry_run = "--dry-run" in arguments
    request, overrides = split([argument for argument in arguments if argument != "--dry-run"])
    script = render(request, overrides)
    if dry_run:
        print(script, end="")
        return
    make_log_folder()
    jobs: list[str] = []
    for number in range(request.chain):
        jobs.append(submit(script, jobs))
        print(
            f"job {jobs[-1]}" + (f", if job {jobs[-2]} ends before the run is complete" if number else ""),
            flush=True,
        )


def split(arguments: Sequence[str]) -> tuple[Request, list[str]]:
    """The keys of the job, and everything else, which is for `train`."""
    request, overrides = split_keys(arguments, Request(), may_be_zero=("warning",))
    if request.gpus_per_node == "ranks_per_node":
        request.gpus_per_node = str(request.ranks_per_node)
    return request, overrides


def render(request: Request, overrides: Sequence[str]) -> str:
    """The job script. Raises ConfigError for everything that the job itself would refuse."""
    loaded = load_config(overrides)
    config = loaded.config
    if request.chain > 1 and config.checkpoint.resume_step is not None:
        raise ConfigError(
            f"checkpoint.resume_step={config.checkpoint.resume_step} and chain={request.chain}: every job of "
            "the chain would go back to that step; submit one job with it first, then the chain"
        )
    check_request(request, config.stop_before)
    check(config, request.nodes * request.ranks_per_node)
    check_prompts(config)
    name = request.job_name or loaded.choices["recipe"]
    options = {
        "job-name": name,
        "nodes": request.nodes,
        "ntasks-per-node": request.ranks_per_node,
        "gpus-per-node": request.gpus_per_node if request.gpus_per_node != "0" else "",
        "cpus-per-task": request.cpus_per_task,
        "time": request.time,
        "account": request.account,
        "partition": request.partition,
        "constraint": request.constraint,
        "output": "logs/%x-%j.out",
        "open-mode": "append",
        "signal": f"B:USR1@{request.warning}",
    }
    knobs = {
        "RECIPE": loaded.choices["recipe"],
        "RUN_DIR": config.run_dir,
        "MODEL": config.model.path,
        "PROMPTS": config.data.prompts,
        "LAUNCHER": request.launcher,
        "CONTAINER": request.container,
        "BINDS": request.binds,
        "PYTHON": request.python or ("" if request.container else sys.executable),
        "OMNIRL_ROOT": checkout() or "",
        "MAX_REQUEUES": 0 if request.chain > 1 else "",  # a chain goes on in the next job
    }
    ours = ("recipe=", "run_dir=", "model.path=", "data.prompts=")
    rest = [override for override in overrides if not override.startswith(ours)]
    header = [
        f"#SBATCH --{option}={header_word(str(value))}" for option, value in options.items() if value != ""
    ]
    header += ["#SBATCH --requeue"] if request.chain == 1 else []
    exports = [f"{knob}={shlex.quote(str(value))}" for knob, value in knobs.items() if value != ""]
    common = (script_folder() / "common.sh").read_text()
    return "\n".join(
        ["#!/usr/bin/env bash", *header, "", *exports, "", common, shlex.join(["train", *rest]), ""]
    )


def check_request(request: Request, stop_before: float) -> None:
    """Raise ConfigError for what Slurm or the job script would refuse, as far as a login node can know."""
    one_of("launcher", request.launcher, LAUNCHERS)
    for field in fields(request):
        value = str(getattr(request, field.name))
        require(value.isprintable(), f"{field.name}={value!r} has characters that cannot be printed")
    require(
        "/" not in request.job_name,
        f"job_name={request.job_name} has a slash: Slurm names the log after the job",
    )
    for key, seconds in (("warning", request.warning), ("stop_before", stop_before)):
        require(
            seconds < seconds_of(request.time),
            f"{key}={seconds:g} (seconds) must be less than time={request.time}",
        )
    here = (
        {"container": request.container} if request.container else {"python": request.python}
    )  # a container has its own python
    for key, value in here.items():
        require("/" not in value or "://" in value or Path(value).exists(), f"{key}={value} does not exist")


def make_log_folder() -> None:
    """Slurm ends a job without a word where the folder of --output is missing."""
    try:
        Path("logs").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{Path('logs').absolute()}, where the job's log goes, cannot be made: {error.strerror}"
        ) from None


def header_word(text: str) -> str:
    """A value on a line of #SBATCH: Slurm ends it at a space or a #, and reads quotes and backslashes."""
    if not set(text) & set(" #'\"\\"):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def seconds_of(time: str) -> float:
    """A time limit in Slurm's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. None at all is the partition's."""
    if time in ("", "UNLIMITED", "INFINITE"):
        return math.inf
    days, dash, clock = time.rpartition("-")
    parts = clock.split(":")
    form = f"time={time} is no time limit of Slurm's: it is written hours:minutes:seconds, or days-hours"
    require(len(parts) <= 3 and all(part.isdecimal() for part in [*parts, days if dash else "0"]), form)
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(int(part) * unit for part, unit in zip(parts, units))


def submit(script: str, earlier: Sequence[str]) -> str:
    """The number of the job. It runs only where all `earlier` ones of the chain ended without completing the
    run.
    """
    command = ["sbatch", "--parsable"]
    if earlier:
        command += [f"--dependency=afternotok:{':'.join(earlier)}", "--kill-on-invalid-dep=yes"]
    try:
        ended = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(
            "sbatch is not here: run this on a login node of a Slurm cluster, or add --dry-run"
        ) from None
    if ended.returncode:
        raise ConfigError(f"Slurm refused the job: {' '.join(ended.stderr.split())}")
    return ended.stdout.strip().split(";")[0]


def script_folder() -> Path:
    """The job scripts: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "sbatch", package.parent / "sbatch"):
        if (folder / "common.sh").is_file():
            return folder
    raise ConfigError(
        f"the installation is incomplete: no sbatch/common.sh in {package} or beside it; install again"
    )


def checkout() -> Path | None:
    """The folder whose code runs now, where that is a checkout: the job runs the same, wherever it is
    submitted.
    """
    folder = script_folder().parent
    return folder if (folder / "omnirl_hpc").is_dir() else None
