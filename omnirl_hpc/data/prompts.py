"""A prompt table in parquet, read one row group at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omnirl_hpc.errors import DataError

TEXT_COLUMNS = ("prompt", "negative_prompt", "target", "id")  # all but the first are optional
CACHED_ROW_GROUPS = 8


@dataclass(frozen=True)
class Prompt:
    """One row of the table. `id` is the row number, as text, where the table has no column `id`."""

    id: str
    prompt: str
    negative_prompt: str | None = None
    target: str | None = None  # what a reward compares with, e.g. the text an image should show
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)
    place: str = field(default="", compare=False)  # file, row group and row, for errors


class PromptTable:
    """Random access to the rows of a parquet file without ever holding the whole file.

    Required column: `prompt` (string). Optional: `negative_prompt`, `target`, `id`. Every other column of
    numbers or text becomes metadata; nested columns and bytes, which may be larger than memory, are never
    read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file = pq.ParquetFile(self.path)
        except (OSError, pa.ArrowInvalid) as error:
            hint = (
                f" ({self._conversion} converts it)" if self.path.suffix in (".txt", ".jsonl", ".csv") else ""
            )
            raise DataError(f"{self.path} cannot be read as parquet: {error}{hint}") from None
        schema = self._file.schema_arrow
        if "prompt" not in schema.names:
            raise DataError(f"{self.path} has no column 'prompt'; its columns are: {', '.join(schema.names)}")
        for column in TEXT_COLUMNS[:-1]:
            if column in schema.names and not _is_text(schema.field(column).type):
                held = schema.field(column).type
                raise DataError(
                    f"{self.path}: the column {column!r} holds {held}, not text; {self._conversion} converts the forms of other systems"
                )
        self._columns = [
            field.name for field in schema if field.name in TEXT_COLUMNS or _is_plain(field.type)
        ]
        metadata = self._file.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._ends = np.cumsum(sizes)
        self._tables: OrderedDict[int, pa.Table] = OrderedDict()
        if not len(self):
            raise DataError(f"{self.path} has no rows")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, row: int) -> Prompt:
        """The prompt in row `row`. Raises DataError naming file, row group and row where the row cannot be
        used.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {self.path}, which has {len(self)}")
        group = int(np.searchsorted(self._ends, row, side="right"))
        offset = row - (int(self._ends[group - 1]) if group else 0)
        record = self._row_group(group).slice(offset, 1).to_pylist()[0]
        text = {name: record.pop(name, None) for name in TEXT_COLUMNS}
        if not (text["prompt"] or "").strip():
            raise DataError(f"{self._place(group, row)}: the prompt is empty")
        identity = str(row) if text["id"] is None else str(text["id"])
        return Prompt(
            identity, text["prompt"], text["negative_prompt"], text["target"], record, self._place(group, row)
        )

    def first(self, count: int) -> list[Prompt]:
        """The first rows. Raises DataError where the table has fewer."""
        if count > len(self):
            raise DataError(f"{self.path} has {len(self)} rows, of which {count} were asked")
        return [self[row] for row in range(count)]

    def blank_rows(self, column: str) -> list[int]:
        """The rows in which a column of text is missing or blank."""
        return (
            self.find_rows(column, lambda text: not text.strip())
            if column in self._columns
            else list(range(len(self)))
        )

    def find_rows(self, column: str, wanted: Callable[[str], bool]) -> list[int]:
        """The rows whose text in `column` is `wanted`; reads only that column. A text that is missing is
        empty.
        """
        if column not in self._columns:
            return []
        rows, first = [], 0
        try:
            for batch in self._file.iter_batches(columns=[column]):
                rows += [
                    first + i for i, text in enumerate(batch.column(0).to_pylist()) if wanted(text or "")
                ]
                first += len(batch)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self.path}, column {column}: {' '.join(str(error).split())}") from None
        return rows

    def _row_group(self, group: int) -> pa.Table:
        if group in self._tables:
            self._tables.move_to_end(group)
        else:
            try:
                self._tables[group] = self._file.read_row_group(group, columns=self._columns)
            except (OSError, pa.ArrowException) as error:
                raise DataError(f"{self.path}, row group {group}: {' '.join(str(error).split())}") from None
            if len(self._tables) > CACHED_ROW_GROUPS:
                self._tables.popitem(last=False)
        return self._tables[group]

    @property
    def _conversion(self) -> str:
        return f"omnirl-hpc prompts OUT.parquet --from {self.path}"

    def _place(self, group: int, row: int) -> str:
        return f"{self.path}, row group {group}, row {row}"


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_null(kind)
    )


def _is_plain(kind: pa.DataType) -> bool:
    return (
        pa.types.is_primitive(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_dictionary(kind)
    )
