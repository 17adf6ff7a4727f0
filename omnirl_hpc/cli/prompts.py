"""`omnirl-hpc prompts`: make a prompt table, or check one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from omnirl_hpc.errors import ConfigError, DataError

SHOWN_FAULTS = 20


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "omnirl-hpc prompts",
        description="Write a prompt table in parquet, made (OUT --kind ocr --count N, OUT --kind glyph) or "
        "converted (OUT --from FILE), or check one (--check FILE).",
    )
    parser.add_argument("out", type=Path, nargs="?", help="file to write")
    parser.add_argument(
        "--kind",
        choices=["ocr", "glyph"],
        help="ocr: scenes with a quoted text to render | glyph: the words that the Glyph model draws",
    )
    parser.add_argument("--count", type=int, help="with --kind ocr: number of prompts")
    parser.add_argument("--seed", type=int, default=0, help="with --kind ocr")
    parser.add_argument(
        "--held-out",
        action="store_true",
        help="with --kind glyph: the words for evaluation, not those for training",
    )
    parser.add_argument(
        "--from",
        type=Path,
        dest="source",
        metavar="FILE",
        help=".txt (a prompt a line, its target between double quotes), .jsonl, .csv or .parquet (ours or "
        "verl-omni's)",
    )
    parser.add_argument(
        "--check", type=Path, metavar="FILE", help="read every row of FILE and name those that cannot be used"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="with --check: also count tokens with this checkpoint's tokenizer",
    )
    parser.add_argument(
        "--family", default="qwen_image", help="with --model: its family, or your own as module:Class"
    )
    options = parser.parse_args(arguments)
    if options.check is not None:
        check_table(options.check, _token_counter(options.family, options.model) if options.model else None)
    elif options.out is not None and options.source is not None and options.kind is None:
        convert_table(options.source, options.out)
    elif options.out is not None and options.kind == "glyph" and options.source is options.count is None:
        write_glyph_words(options.out, options.held_out)
    elif (
        options.out is not None
        and options.kind == "ocr"
        and options.count is not None
        and options.source is None
    ):
        write_table(options.out, options.count, options.seed)
    else:
        parser.error(
            "say what to do: OUT --kind ocr --count N, OUT --kind glyph [--held-out], OUT --from FILE, "
            "or --check FILE"
        )


def write_table(out: Path, count: int, seed: int) -> None:
    if count < 1:
        raise ConfigError(f"--count {count}: at least one prompt is needed")
    from omnirl_hpc.data.ocr_prompts import write_ocr_table

    with _new_file(out):
        write_ocr_table(str(out), count, seed)
    print(f"wrote {count} prompts to {out}")


def write_glyph_words(out: Path, held_out: bool) -> None:
    from omnirl_hpc.data.glyph_words import HELD_OUT, TRAINING, write_glyph_table

    with _new_file(out):
        write_glyph_table(str(out), held_out)
    print(f"wrote {len(HELD_OUT if held_out else TRAINING)} prompts to {out}")


def convert_table(source: Path, out: Path) -> None:
    if not source.is_file():
        raise ConfigError(
            f"--from {source} does not exist" if not source.exists() else f"--from {source} is not a file"
        )
    from omnirl_hpc.data.conversion import convert

    with _new_file(out):
        count, with_target = convert(source, out)
    print(f"wrote {count} prompts to {out}, {with_target} of them with a target")


@contextmanager
def _new_file(out: Path) -> Iterator[None]:
    if out.exists():
        raise ConfigError(f"{out} exists; delete it or choose another name")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from None


def check_table(file: Path, count_tokens: Callable[[str], int] | None = None) -> None:
    """Print what cannot be used. Raises DataError where there is anything: a job would have met it in some
    later hour.
    """
    from omnirl_hpc.data.prompts import PromptTable

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
    print(
        f"{file}: {len(table)} prompts, all usable"
        + (f"; the longest has {longest} tokens" if count_tokens else "")
    )


def _token_counter(family: str, model: Path) -> Callable[[str], int]:
    from omnirl_hpc.config.classes import find_class
    from omnirl_hpc.config.schema import ModelConfig
    from omnirl_hpc.launch.runtime import prepare_process

    prepare_process(threads_per_rank=1)
    return find_class("model", family)(ModelConfig(family=family, path=str(model))).count_text_tokens
