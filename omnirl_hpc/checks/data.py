"""Do the prompt tables have what rewards, evaluations and the model need of them? Asked before weights are
loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import Config
from omnirl_hpc.data.preferences import PreferenceTable
from omnirl_hpc.data.prompts import PromptTable
from omnirl_hpc.errors import DataError

SHOWN_ROWS = 10
FILL = "Fill them, or take them out"


def check_prompts(config: Config) -> None:
    """Raise DataError for a table that cannot be opened, or naming the rows that lack a prompt, or a target
    that a reward needs.

    The tables are those of training and of evaluation; the one of evaluation must also have as many prompts
    as are asked.
    """
    needing = [
        part.name for part in config.reward.parts.values() if find_class("reward", part.name).needs_target
    ]
    for table in _tables(config):
        _refuse(table, table.blank_rows("prompt"), "have no prompt", FILL)
        if needing:
            why = f"reward {needing[0]} compares with the column `target`, and "
            _refuse(table, table.blank_rows("target"), "have no target", FILL, why)
    if config.evaluation.every:
        PromptTable(config.evaluation.prompts or config.data.prompts).first(config.evaluation.num_prompts)


def check_pairs(config: Config) -> None:
    """Raise DataError for a table without the pairs that the algorithm needs. Imports the algorithm's file."""
    if find_class("algorithm", config.algorithm.name).source == "preferences":
        PreferenceTable(config.data.prompts)


class TokenCounter(Protocol):
    """What a model family knows of text: it reads the tokenizer's files and no weights."""

    def count_text_tokens(self, text: str) -> int: ...

    def longest_text(self, widths: Sequence[int]) -> int: ...


def check_prompt_lengths(config: Config, family: TokenCounter) -> None:
    """Raise DataError naming the rows whose prompts are too long for the model or for data.text_lengths: one in a
    far row would end a long run.
    """
    longest, overhead = family.longest_text(config.data.text_lengths), family.count_text_tokens("")

    def too_long(text: str) -> bool:
        if overhead + len(text.encode()) <= longest:  # no tokenizer makes more tokens than there are bytes
            return False
        try:
            return family.count_text_tokens(text) > longest
        except DataError:  # longer than the model takes
            return True

    columns = ["prompt", "negative_prompt"] if config.sampling.true_cfg_scale > 1 else ["prompt"]
    cure = f"Shorten them, take them out, or add a width to data.text_lengths={config.data.text_lengths}"
    for table in _tables(config):
        for column in columns:
            _refuse(
                table,
                table.find_rows(column, too_long),
                f"have a {column} of {longest + 1} tokens or more",
                cure,
            )
    if "negative_prompt" in columns and too_long(config.data.negative_prompt):
        raise DataError(
            f"data.negative_prompt has {longest + 1} tokens or more: shorten it, or add a width to data.text_lengths"
        )


def _tables(config: Config) -> list[PromptTable]:
    """Of training and of evaluation."""
    return [
        PromptTable(path)
        for path in dict.fromkeys((config.data.prompts, config.evaluation.prompts or config.data.prompts))
    ]


def _refuse(table: PromptTable, rows: list[int], fault: str, cure: str, why: str = "") -> None:
    if rows:
        shown = ", ".join(map(str, rows[:SHOWN_ROWS])) + (", …" if len(rows) > SHOWN_ROWS else "")
        raise DataError(
            f"{why}{len(rows)} of {len(table)} rows of {table.path} {fault}: rows {shown}. {cure}"
        )
