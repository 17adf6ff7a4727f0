"""`omnirl-hpc tiny-model OUT`: a checkpoint to try everything with."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from omnirl_hpc.checkpoints.files import follow_umask
from omnirl_hpc.config.classes import built_in
from omnirl_hpc.errors import ConfigError


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "omnirl-hpc tiny-model",
        description="Write a tiny checkpoint of a model family with random weights (1 to 4 MB).",
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--family", choices=built_in("model"), default="qwen_image")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--full-size",
        action="store_true",
        help="Qwen-Image's own transformer and VAE (41 GB), to measure with",
    )
    options = parser.parse_args(arguments)
    if options.full_size and options.family != "qwen_image":
        raise ConfigError(f"--full-size is for --family qwen_image, not for {options.family}")
    make_folder(options.out)
    from omnirl_hpc.launch.runtime import prepare_process

    prepare_process(threads_per_rank=1)
    family = importlib.import_module(f"omnirl_hpc.models.{options.family}.tiny")
    (family.write_full_size if options.full_size else family.write_tiny)(options.out, options.seed)
    follow_umask(options.out)
    print(f"wrote {options.out}")


def make_folder(out: Path) -> None:
    """Raises ConfigError where it cannot be made, or holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be made: {error}") from None
