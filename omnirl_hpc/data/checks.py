"""Do the prompt tables have what rewards and evaluations need of them? Asked before anything is loaded."""

from __future__ import annotations

from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import Config
from omnirl_hpc.data.prompts import PromptTable
from omnirl_hpc.errors import DataError

SHOWN_ROWS = 10


def check_prompts(config: Config) -> None:
    """Raise DataError for a table that cannot be opened, or naming the rows that lack a prompt, or a target that a reward needs.

    The tables are those of training and of evaluation; the one of evaluation must also have as many prompts as are asked.
    """
    needing = [part.name for part in config.reward.parts.values() if find_class("reward", part.name).needs_target]
    for path in dict.fromkeys((config.data.prompts, config.evaluation.prompts or config.data.prompts)):
        _check_table(PromptTable(path), needing)
    if config.evaluation.every:
        PromptTable(config.evaluation.prompts or config.data.prompts).first(config.evaluation.num_prompts)


def _check_table(table: PromptTable, needing: list[str]) -> None:
    _require_filled(table, "prompt", "")
    if needing:
        _require_filled(table, "target", f"reward {needing[0]} compares with the column `target`, and ")


def _require_filled(table: PromptTable, column: str, why: str) -> None:
    rows = table.blank_rows(column)
    if rows:
        shown = ", ".join(map(str, rows[:SHOWN_ROWS])) + (", …" if len(rows) > SHOWN_ROWS else "")
        raise DataError(
            f"{why}{len(rows)} of {len(table)} rows of {table.path} have no {column}: rows {shown}. Fill them, or take them out"
        )
