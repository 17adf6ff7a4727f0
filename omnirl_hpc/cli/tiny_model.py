"""`omnirl-hpc tiny-model OUT`: a checkpoint to try everything with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from omnirl_hpc.checkpoints.files import follow_umask
from omnirl_hpc.errors import ConfigError


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "omnirl-hpc tiny-model", description="Write a tiny Qwen-Image with random weights (2 MB)."
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--full-size",
        action="store_true",
        help="Qwen-Image's own transformer and VAE (41 GB), to measure with",
    )
    options = parser.parse_args(arguments)
    make_folder(options.out)
    from omnirl_hpc.launch.runtime import prepare_process

    prepare_process(threads_per_rank=1)
    from omnirl_hpc.models.qwen_image.tiny import write_full_size_qwen_image, write_tiny_qwen_image

    (write_full_size_qwen_image if options.full_size else write_tiny_qwen_image)(options.out, options.seed)
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
