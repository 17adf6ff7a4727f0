"""Can every row of the prompt tables be used: by the program, by the rewards, by the model?

Asked before weights are loaded, by `omnirl-hpc prompts --check` and by `train` alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import Config
from omnirl_hpc.data.preferences import PreferenceTable
from omnirl_hpc.data.prompts import Prompt, PromptTable
from omnirl_hpc.errors import DataError
from omnirl_hpc.rewards.reward import metadata_columns

SHOWN_ROWS = 5

# Why a prompt cannot be used, or None
Demand = Callable[[Prompt], str | None]


def check_prompts(config: Config) -> None:
    """Raise DataError naming rows that cannot be used, or a table that cannot be opened.

    The tables are those of training and of evaluation; the one of evaluation must also have as many prompts
    as are asked.
    """
    for table in open_tables(config):
        _refuse(table, find_faults(table, demands(config)))
    if config.evaluation.every:
        PromptTable(config.evaluation.prompts or config.data.prompts).first(config.evaluation.num_prompts)


def check_pairs(config: Config) -> None:
    """Raise DataError for a table without the pairs that the algorithm needs.
    Imports the algorithm's file.
    """
    if find_class("algorithm", config.algorithm.name).source == "preferences":
        PreferenceTable(config.data.prompts)


class TokenCounter(Protocol):
    """What a model family knows of text: it reads the tokenizer's files and no weights."""

    def count_text_tokens(self, text: str) -> int: ...

    def longest_text(self, widths: Sequence[int]) -> int: ...


def check_prompt_lengths(config: Config, family: TokenCounter) -> None:
    """Raise DataError naming the rows whose prompts are too long for the model or for data.text_lengths: one
    in a far row would end a long run.
    """
    demand = length_demand(config, family)
    for table in open_tables(config):
        _refuse(table, find_faults(table, [demand]))


def find_faults(table: PromptTable, demands: list[Demand]) -> Iterator[str]:
    """The rows that cannot be used, in order: place and reason. Rows of one id would share random draws."""
    places: dict[str, str] = {}
    for place, prompt in table.scan():
        if isinstance(prompt, DataError):
            yield str(prompt)
        elif places.setdefault(prompt.id, place) != place:
            yield f"{place}: the id {prompt.id} is that of {places[prompt.id]}, too"
        else:
            yield from (f"{place}: {why}" for demand in demands if (why := demand(prompt)))


def demands(config: Config) -> list[Demand]:
    """What the rewards of a run need of every prompt."""
    needing = [
        name for name, part in config.reward.parts.items() if find_class("reward", part.name).needs_target
    ]
    if not needing:
        return []
    why = f"it has no target, with which reward {needing[0]} compares"
    return [lambda prompt: None if (prompt.target or "").strip() else why]


def length_demand(config: Config, family: TokenCounter) -> Demand:
    """What the model and data.text_lengths need. Raises DataError where data.negative_prompt is too long."""
    longest, overhead = family.longest_text(config.data.text_lengths), family.count_text_tokens("")

    def too_long(name: str, text: str) -> str | None:
        if overhead + len(text.encode()) <= longest:  # no tokenizer makes more tokens than there are bytes
            return None
        try:
            tokens = family.count_text_tokens(text)
        except DataError as error:  # longer than the model takes
            return str(error)
        if tokens <= longest:
            return None
        return (
            f"its {name} has {tokens} tokens, of which data.text_lengths={config.data.text_lengths} allow "
            f"{longest}"
        )

    with_guidance = config.sampling.true_cfg_scale > 1
    if with_guidance and (why := too_long("negative prompt", config.data.negative_prompt)):
        raise DataError(f"data.negative_prompt cannot be used: {why}")

    def demand(prompt: Prompt) -> str | None:
        negative = prompt.negative_prompt if with_guidance else None
        return too_long("prompt", prompt.prompt) or too_long("negative prompt", negative or "")

    return demand


def open_tables(config: Config) -> list[PromptTable]:
    """Of training and of evaluation."""
    paths = dict.fromkeys((config.data.prompts, config.evaluation.prompts or config.data.prompts))
    return [PromptTable(path, metadata_columns(config.reward)) for path in paths]


def _refuse(table: PromptTable, found: Iterator[str]) -> None:
    if faults := [fault.removeprefix(f"{table.path}, ") for fault in found]:
        shown = "; ".join(faults[:SHOWN_ROWS]) + ("; …" if len(faults) > SHOWN_ROWS else "")
        raise DataError(
            f"{len(faults)} of {len(table)} rows of {table.path} cannot be used: {shown}. Mend them, or take "
            f"them out; omnirl-hpc prompts --check {table.path} with the run's settings names them all"
        )
