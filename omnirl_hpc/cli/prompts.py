"""`omnirl-hpc prompts OUT.parquet`: make a prompt table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Sequence

from omnirl_hpc.errors import ConfigError


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("omnirl-hpc prompts", description="Write a prompt table in parquet.")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--kind", choices=["ocr"], required=True, help="ocr: scenes with a quoted text to render")
    parser.add_argument("--count", type=int, required=True, help="number of prompts")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.count < 1:
        raise ConfigError(f"--count {options.count}: at least one prompt is needed")
    if options.out.exists():
        raise ConfigError(f"{options.out} exists; delete it or choose another name")
    from omnirl_hpc.data.ocr_prompts import write_ocr_table

    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_ocr_table(str(options.out), options.count, options.seed)
    except OSError as error:
        raise ConfigError(f"{options.out} cannot be written: {error}") from None
    print(f"wrote {options.count} prompts to {options.out}")
