"""The folder of one run and the files in it."""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from omnirl_hpc import __version__
from omnirl_hpc.errors import ConfigError

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "tensordict", "pyarrow", "hydra-core", "vllm", "vllm-omni")


class RunDirectory:
    """config.yaml, environment.json, metrics.jsonl, samples/, log/rank_N.log."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples"
        self.logs = self.path / "log"

    def check_unused(self) -> None:
        """Raise ConfigError where a run has been here: nothing of a user's is overwritten."""
        if self.config.exists():
            raise ConfigError(f"run_dir={self.path} already holds a run ({self.config} exists): choose another folder or delete it")

    def create(self) -> None:
        """Make the folders. Every rank may call it. Raises ConfigError where the place cannot be written to."""
        try:
            for folder in (self.path, self.samples, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run_dir={self.path} cannot be made: {error}") from None

    def write_start(self, config_yaml: str, choices: dict[str, str]) -> None:
        """Record what is about to run. Rank 0 only."""
        self.config.write_text(config_yaml)
        self.environment.write_text(json.dumps({**describe_environment(), "choices": choices}, indent=2) + "\n")

    def append_metrics(self, values: dict[str, Any]) -> None:
        """One line of metrics.jsonl. Rank 0 only."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def log_to_file(self, rank: int, world_size: int) -> None:
        """Send this rank's log records to log/rank_N.log."""
        handler = logging.FileHandler(self.logs / f"rank_{rank:0{len(str(world_size - 1))}d}.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger = logging.getLogger("omnirl_hpc")
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)


def describe_environment() -> dict[str, Any]:
    """What a reader needs to run the same again: versions, host, command."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "omnirl_hpc": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": versions,
        "host": socket.gethostname(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "slurm": {name: os.environ[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT") if name in os.environ},
    }


def _commit() -> str | None:
    """The commit of the checkout this package is run from; None when it is installed from a wheel or git is missing."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        return subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None
