"""The entry point: finds the command and turns expected errors into one sentence and an exit code."""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from omnirl_hpc import __version__
from omnirl_hpc.errors import EXIT_INTERRUPTED, EXIT_NO_READER, EXIT_USAGE, OmniRLError

# command -> (module with run(arguments), what it does)
COMMANDS = {
    "train": (
        "omnirl_hpc.cli.train",
        "train with RL: omnirl-hpc train recipe=NAME run_dir=DIR model.path=DIR data.prompts=FILE …",
    ),
    "evaluate": (
        "omnirl_hpc.cli.evaluate",
        "base and adapter side by side on fixed prompts: omnirl-hpc evaluate RUN OUT [--step N] …",
    ),
    "status": (
        "omnirl_hpc.cli.status",
        "step, reward, speed and checkpoints of a run: omnirl-hpc status RUN",
    ),
    "report": (
        "omnirl_hpc.cli.report",
        "one page about a run that opens offline: omnirl-hpc report RUN [--out FILE]",
    ),
    "export": (
        "omnirl_hpc.cli.export",
        "a run's adapter for diffusers: omnirl-hpc export RUN OUT [--step N] [--policy NAME] [--merge]",
    ),
    "plan": (
        "omnirl_hpc.cli.plan",
        "memory, time and layout of a run, without a GPU: omnirl-hpc plan recipe=NAME nodes=2 gpu=h200 …",
    ),
    "recipes": (
        "omnirl_hpc.cli.recipes",
        "the recipes and where their numbers come from: omnirl-hpc recipes",
    ),
    "compare": ("omnirl_hpc.cli.compare", "are two runs equal to the bit: omnirl-hpc compare RUN_A RUN_B"),
    "submit": (
        "omnirl_hpc.cli.submit",
        "make a Slurm job script from settings and submit it: omnirl-hpc submit [--dry-run] …",
    ),
    "sweep": (
        "omnirl_hpc.cli.sweep",
        "the combinations of a sweep, for job arrays: omnirl-hpc sweep seed=0,1 …",
    ),
    "doctor": (
        "omnirl_hpc.cli.doctor",
        "test the installation, or with srun the nodes: [srun] omnirl-hpc doctor [recipe=NAME …]",
    ),
    "prefetch": (
        "omnirl_hpc.cli.prefetch",
        "fetch a recipe's model for offline nodes: omnirl-hpc prefetch recipe=NAME model.path=DIR",
    ),
    "tiny-model": (
        "omnirl_hpc.cli.tiny_model",
        "write a tiny random Qwen-Image checkpoint: omnirl-hpc tiny-model OUT",
    ),
    "glyph-model": (
        "omnirl_hpc.cli.glyph_model",
        "write Glyph, a small Qwen-Image that draws words: omnirl-hpc glyph-model OUT",
    ),
    "prompts": (
        "omnirl_hpc.cli.prompts",
        "write, convert or check a prompt table: omnirl-hpc prompts OUT.parquet --from FILE",
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit. 0: done, 1: a run failed, 2: something was wrong before it started."""
    try:
        try:
            run_command(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            print(end="", flush=True)  # here and not when Python ends, which makes it a traceback
    except BrokenPipeError:
        if has_reader(sys.stdout.fileno()):
            raise  # another pipe, such as to a process that scores rewards
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_NO_READER)


def has_reader(file: int) -> bool:
    """Whether somebody still reads the pipe `file`; true of what is no pipe."""
    pipe = select.poll()
    pipe.register(file, 0)
    return not any(events & select.POLLERR for _, events in pipe.poll(0))


def run_command(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        sys.exit(0 if arguments else EXIT_USAGE)
    if arguments[0] == "--version":
        print(f"omnirl_hpc {__version__}")
        sys.exit(0)
    command, *rest = arguments
    if command not in COMMANDS:
        print(
            f"omnirl-hpc: unknown command {command!r}; known: {', '.join(COMMANDS)} (see omnirl-hpc help)",
            file=sys.stderr,
        )
        sys.exit(EXIT_USAGE)
    try:
        importlib.import_module(COMMANDS[command][0]).run(rest)
    except OmniRLError as error:
        said = f"omnirl-hpc {command}: {error}"
        print(said, file=sys.stderr, flush=True)
        tell_torchrun(said)
        sys.exit(error.exit_code)
    except PermissionError as error:  # anywhere: most of all in the folder of another user
        print(f"omnirl-hpc {command}: {error.filename}: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USAGE)
    except KeyboardInterrupt:  # before `train` has its own handler, and in all other commands
        sys.exit(EXIT_INTERRUPTED)


def tell_torchrun(said: str) -> None:
    """torchrun ends with a traceback of its own, and below it what the first rank that failed has written
    here.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": said, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": said, "extraInfo": extra}}))


def usage() -> str:
    lines = [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: omnirl-hpc COMMAND …", "", *lines, "", "omnirl-hpc COMMAND --help says more."])
