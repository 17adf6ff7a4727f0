"""The folder of one run and the files in it."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omnirl_hpc import __version__, installation
from omnirl_hpc.config.resume import check_same_run
from omnirl_hpc.errors import ConfigError, LockLostError, OutputError


class RunDirectory:
    """config.yaml, environment.json, metrics.jsonl, samples/, log/rank_N.log."""

    def __init__(self, path: str | Path, require_lock: Callable[[], None] = lambda: None) -> None:
        """require_lock: raises LockLostError where this run may not write; of no use to who only reads."""
        self.path = Path(path)
        self.require_lock = require_lock
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples"
        self.hashes = self.path / "hashes.jsonl"
        self.logs = self.path / "log"
        self.checkpoints = self.path / "checkpoints"
        self.evaluation = self.path / "evaluation"
        self.tracked = self.path / "tracked.json"
        self.returned = self.path / "returned.json"

    def require_run(self) -> None:
        """Raise ConfigError where the folder holds no run."""
        if not self.path.is_dir():
            raise ConfigError(
                f"{self.path} does not exist" if not self.path.exists() else f"{self.path} is not a folder"
            )
        if not self.config.is_file():
            raise ConfigError(f"{self.path} is not the folder of a run: it has no config.yaml")

    def check_same_run(self, config_yaml: str, unused: Sequence[str] = ()) -> None:
        """Raise ConfigError where the folder holds a run with other settings: a run goes on only as what it
        is. unused: groups whose classes `config_yaml` was loaded without.
        """
        try:
            if not any(name.startswith("step_") for name in os.listdir(self.checkpoints)):
                return  # a start that failed binds nobody
            saved_yaml = self.config.read_text()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise ConfigError(
                f"run_dir={self.path}: {error.filename} cannot be read ({error.strerror})"
            ) from None
        check_same_run(saved_yaml, config_yaml, str(self.path), unused)

    def create(self) -> None:
        """Make the folders. Every rank may call it. Raises ConfigError where the place cannot be written."""
        try:
            for folder in (self.path, self.samples, self.logs, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run_dir={self.path} cannot be made: {error}") from None

    def write_start(self, config_yaml: str, choices: dict[str, str]) -> None:
        """Record what is about to run. Rank 0 only."""
        self._replace(self.config, config_yaml)
        self._replace(
            self.environment, json.dumps({**describe_environment(), "choices": choices}, indent=2) + "\n"
        )

    def add_choice(self, name: str, value: str) -> None:
        """Record what was found out after the start. Rank 0 only."""
        environment = json.loads(self.environment.read_text())
        environment["choices"][name] = value
        self._replace(self.environment, json.dumps(environment, indent=2) + "\n")

    def cut(self, step: int, metrics: int) -> None:
        """Take out what was written about step `step` (`metrics`: in metrics.jsonl) and later ones, and half
        lines. Rank 0 only.

        It will be written again, or another way; until then abandoned_metrics.jsonl has it.
        """
        for path, end in ((self.metrics, metrics), (self.hashes, step), (self.samples / "index.jsonl", step)):
            if path.exists():
                lines = path.read_text().splitlines()
                if taken_out := [line for line in lines if _step_of(line) >= end]:
                    aside = path.with_name(f"abandoned_{path.name}")
                    with self.writing(aside), aside.open("a") as file:
                        file.writelines(line + "\n" for line in taken_out)
                self._replace(path, "".join(line + "\n" for line in lines if _step_of(line) < end))

    def append_metrics(self, values: dict[str, Any]) -> None:
        """One line of metrics.jsonl. Rank 0 only. What is no finite number becomes null: NaN is not JSON."""
        values = {
            name: v if not isinstance(v, float) or math.isfinite(v) else None for name, v in values.items()
        }
        with self.writing(self.metrics), self.metrics.open("a") as file:
            file.write(json.dumps(values, allow_nan=False) + "\n")

    def last_step(self) -> int:
        """The last one in metrics.jsonl; -1 where there is none. Raises ConfigError where it cannot be
        read.
        """
        try:
            lines = self.metrics.read_text().splitlines()
        except FileNotFoundError:
            return -1
        except OSError as error:
            raise ConfigError(f"{self.metrics} cannot be read ({error.strerror})") from None
        return max((int(step) for step in map(_step_of, lines) if step < math.inf), default=-1)

    def last_step_tracked(self) -> int:
        """The last step that trackers were told of; -1 where there is none. Rank 0 only."""
        return _read_note(self.tracked).get("step", -1)

    def note_step_tracked(self, step: int) -> None:
        """Before they are told: a gap is better than a step that is there twice. Rank 0 only."""
        self._replace(self.tracked, json.dumps({"step": step}))

    def has_returned(self, job: str, step: int) -> bool:
        """Whether a Slurm job has already gone back to the step that it was submitted to go back to."""
        return _read_note(self.returned) == {"job": job, "step": step}

    def note_return(self, job: str, step: int) -> None:
        """Rank 0 only."""
        self._replace(self.returned, json.dumps({"job": job, "step": step}))

    def log_to_file(self, rank: int, world_size: int) -> None:
        """Send this rank's log records to log/rank_N.log, and rank 0's warnings to the screen too."""
        handler = logging.FileHandler(self.logs / f"rank_{rank:0{len(str(world_size - 1))}d}.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        handler.addFilter(lambda record: self._may_write())
        logger = logging.getLogger("omnirl_hpc")
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        if rank == 0:
            screen = logging.StreamHandler()
            screen.setLevel(logging.WARNING)
            screen.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
            logger.addHandler(screen)

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Around every write to the folder. Raises LockLostError where the run has lost it,
        or OutputError.
        """
        with writing(path):
            self.require_lock()
            yield

    def _may_write(self) -> bool:
        try:
            self.require_lock()
        except (LockLostError, OSError):  # what writes results reports it; a log must not end the run
            return False
        return True

    def _replace(self, path: Path, text: str) -> None:
        """Write a file whole or not at all: a run killed here must still be one that can go on."""
        temporary = path.with_suffix(".tmp")
        with self.writing(path):
            temporary.write_text(text)
            temporary.replace(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises OutputError where the system refuses to write `path`, a file or a folder of results."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror or error}: make room or regain access there; the "
            "same command goes on"
        ) from None


def _read_note(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _step_of(line: str) -> float:
    """The step of a line of JSON; infinity for half a line, which a killed run leaves at the end."""
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return math.inf


def describe_environment() -> dict[str, Any]:
    """What a reader needs to run the same again: versions, host, command."""
    return {
        "omnirl_hpc": __version__,
        "commit": installation.commit(),
        "python": platform.python_version(),
        "packages": installation.packages(),
        "host": socket.gethostname(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "slurm": {
            name: os.environ[name]
            for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT")
            if name in os.environ
        },
    }
