"""`omnirl-hpc prompts`: make a prompt table, or check one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Sequence

from omnirl_hpc.errors import ConfigError, DataError

SHOWN_FAULTS = 20


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "omnirl-hpc prompts",
        description="Write a prompt table in parquet (OUT --kind ocr --count N), or check one (--check FILE).",
    )
    parser.add_argument("out", type=Path, nargs="?", help="file to write")
    parser.add_argument("--kind", choices=["ocr"], help="ocr: scenes with a quoted text to render")
    parser.add_argument("--count", type=int, help="number of prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", type=Path, metavar="FILE", help="read every row of FILE and name those that cannot be used")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="with --check: also count tokens with this checkpoint's tokenizer"
    )
    options = parser.parse_args(arguments)
    if options.check is not None:
        check_table(options.check, options.model)
    elif options.out is None or options.kind is None or options.count is None:
        parser.error("the following arguments are required: out, --kind, --count (or --check FILE)")
    else:
        write_table(options.out, options.count, options.seed)


def write_table(out: Path, count: int, seed: int) -> None:
    if count < 1:
        raise ConfigError(f"--count {count}: at least one prompt is needed")
    if out.exists():
        raise ConfigError(f"{out} exists; delete it or choose another name")
    from omnirl_hpc.data.ocr_prompts import write_ocr_table

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_ocr_table(str(out), count, seed)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from None
    print(f"wrote {count} prompts to {out}")


def check_table(file: Path, model: Path | None) -> None:
    """Print what cannot be used. Raises DataError where there is anything: a job would have met it in some later hour."""
    from omnirl_hpc.data.prompts import PromptTable

    count_tokens = _token_counter(model) if model else None
    table, faults, longest, identities = PromptTable(file), [], 0, set()
    for row in range(len(table)):
        try:
            prompt = table[row]
            if prompt.id in identities:
                raise DataError(f"{prompt.place}: the id {prompt.id} is another row's too")
            identities.add(prompt.id)
            if count_tokens is not None:
                try:
                    longest = max(longest, count_tokens(prompt.prompt))
                except DataError as error:
                    raise DataError(f"{prompt.place}: {error}") from None
        except DataError as error:
            faults.append(str(error))
    for fault in faults[:SHOWN_FAULTS]:
        print(fault)
    if faults:
        raise DataError(f"{len(faults)} of {len(table)} rows of {file} cannot be used")
    print(f"{file}: {len(table)} prompts, all usable" + (f"; the longest has {longest} tokens" if model else ""))


def _token_counter(model: Path):
    from omnirl_hpc.config.schema import ModelConfig
    from omnirl_hpc.launch.runtime import prepare_process

    prepare_process(threads_per_rank=1)
    from omnirl_hpc.models import FAMILIES

    return FAMILIES["qwen_image"](ModelConfig(path=str(model))).count_text_tokens
