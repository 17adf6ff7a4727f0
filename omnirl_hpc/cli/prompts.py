"""`omnirl-hpc prompts`: make a prompt table, or check one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import ConfigError, DataError

SHOWN_FAULTS = 20


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "omnirl-hpc prompts",
        usage="%(prog)s OUT --kind ocr --count N [--seed S] | OUT --kind glyph [--held-out] | "
        "OUT --from FILE [--encoding NAME] | --check FILE [KEY=VALUE …]",
        description="Write a prompt table in parquet, made or converted, or check one.",
    )
    parser.add_argument("words", nargs="*", help="file to write; with --check settings, as of `train`")
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
        help=".txt (a prompt a line, its target between double quotes), .jsonl, .json, .csv, .tsv, .parquet "
        "(ours or verl-omni's), or a folder of parquet files",
    )
    parser.add_argument("--encoding", metavar="NAME", help="of the text in FILE, where it is not UTF-8")
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="read every row of FILE and name those that cannot be used: by a recipe's rewards with "
        "recipe=NAME, by a model's tokenizer with model.path=DIR",
    )
    options = parser.parse_intermixed_args(arguments)
    made = options.kind == "ocr" and options.count is not None
    if options.check is not None:
        check_table(options.check, options.words)
    elif len(options.words) == 1 and options.source is not None and options.kind is None:
        convert_table(options.source, Path(options.words[0]), options.encoding)
    elif len(options.words) == 1 and options.kind == "glyph" and options.source is options.count is None:
        write_glyph_words(Path(options.words[0]), options.held_out)
    elif len(options.words) == 1 and made and options.source is None:
        write_table(Path(options.words[0]), options.count, options.seed)
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


def convert_table(source: Path, out: Path, encoding: str | None = None) -> None:
    if not source.exists():
        raise ConfigError(f"--from {source} does not exist")
    from omnirl_hpc.data.conversion import convert

    with _new_file(out):
        count, with_target = convert(source, out, encoding)
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


def check_table(file: Path, overrides: Sequence[str] = ()) -> None:
    """Print what a run with these settings cannot use. Raises DataError where there is anything."""
    from omnirl_hpc.checks.data import demands, find_faults, length_demand
    from omnirl_hpc.checks.node_rules import model_is_supported
    from omnirl_hpc.config.load import NO_PATHS, load_config
    from omnirl_hpc.data.prompts import Prompt, PromptTable
    from omnirl_hpc.rewards.reward import metadata_columns

    config = load_config([*NO_PATHS, *overrides], unused=("algorithm",)).config
    table, asked, family = PromptTable(file, metadata_columns(config.reward)), demands(config), None
    if config.model.path != "-":
        model_is_supported(config, world_size=1)
        family = _family(config)
        asked.append(length_demand(config, family))
    count = 0
    for count, fault in enumerate(find_faults(table, asked), 1):
        if count <= SHOWN_FAULTS:
            print(fault)
    if count:
        raise DataError(f"{count} of {len(table)} rows of {file} cannot be used")
    longest = ""
    if family is not None:
        tokens = (
            family.count_text_tokens(prompt.prompt)
            for _, prompt in table.scan()
            if isinstance(prompt, Prompt)
        )
        longest = f"; the longest has {max(tokens)} tokens"
    print(f"{file}: {len(table)} prompts, all usable{longest}")


def _family(config: Config) -> Any:
    from omnirl_hpc.config.classes import find_class
    from omnirl_hpc.launch.runtime import prepare_process

    prepare_process(threads_per_rank=1)
    return find_class("model", config.model.family)(config.model)
