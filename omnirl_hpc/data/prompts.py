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


@dataclass(frozen=True, order=True)
class MediaRef:
    """An image, a video or a sound in a row of a table, read when it is asked for: as bytes in the row, or
    from the file that the row names, relative to the table's folder.
    """

    table: str
    row_group: int
    row: int  # in the row group
    column: str
    item: int = 0  # where the column holds lists

    def read(self) -> bytes:
        """The file's bytes. Raises DataError where the row has none, or names a file that cannot be read."""
        with pq.ParquetFile(self.table) as file:
            cell = file.read_row_group(self.row_group, columns=[self.column])[self.column][self.row].as_py()
        held = cell[self.item] if isinstance(cell, list) else cell
        if held.get("bytes") is not None:
            return held["bytes"]
        if held.get("path") is None:
            raise DataError(f"{self}: it has neither bytes nor a path")
        try:
            return (Path(self.table).parent / held["path"]).read_bytes()
        except OSError as error:
            raise DataError(f"{self}: {held['path']} cannot be read ({error.strerror})") from None

    def __str__(self) -> str:
        return f"{self.table}, row group {self.row_group}, row {self.row} of it, column {self.column}"


@dataclass(frozen=True)
class Prompt:
    """One row of the table. `id` is the row number, as text, where the table has no column `id`."""

    id: str
    prompt: str
    negative_prompt: str | None = None
    target: str | None = None  # what a reward compares with, e.g. the text an image should show
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)
    place: str = field(default="", compare=False)  # file, row group and row, for errors
    # What the prompt comes with besides text: the name of a column -> its images, videos or sounds.
    media: dict[str, tuple[MediaRef, ...]] = field(default_factory=dict, hash=False, repr=False)


class PromptTable:
    """Random access to the rows of a parquet file without ever holding the whole file.

    Required column: `prompt` (string). Optional: `negative_prompt`, `target`, `id`. Every other column of
    numbers or text becomes metadata. A column of {bytes, path}, or of lists of them, as the library datasets
    writes images, videos and sounds, becomes media: of it only the paths are read, since the bytes may be
    larger than memory. Other nested columns and bytes are never read.
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
        self._media_columns = {field.name for field in schema if _is_media(field.type)}
        self._read_columns = [*self._columns, *_path_columns(self._file, self._media_columns)]
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
        media = {name: self._media(group, offset, name, record.pop(name)) for name in self._media_columns}
        return Prompt(
            id=str(row) if text["id"] is None else str(text["id"]),
            prompt=text["prompt"],
            negative_prompt=text["negative_prompt"],
            target=text["target"],
            metadata=record,
            place=self._place(group, row),
            media={name: refs for name, refs in media.items() if refs},
        )

    def _media(self, group: int, offset: int, column: str, cell: Any) -> tuple[MediaRef, ...]:
        """What a cell of {path}, or of a list of them, refers to; nothing where it is null."""
        if cell is None:
            return ()
        items = range(len(cell)) if isinstance(cell, list) else (0,)
        return tuple(MediaRef(str(self.path), group, offset, column, item) for item in items)

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
                self._tables[group] = self._file.read_row_group(group, columns=self._read_columns)
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


def _is_media(kind: pa.DataType) -> bool:
    """{bytes, path}, or a list of them."""
    item = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind
    return pa.types.is_struct(item) and {field.name for field in item} == {"bytes", "path"}


def _path_columns(file: pq.ParquetFile, columns: set[str]) -> list[str]:
    """The leaves of media columns that hold paths: a row group can be read without its bytes."""
    leaves = [file.schema.column(i).path for i in range(len(file.schema))]
    return [leaf for leaf in leaves if leaf.split(".")[0] in columns and leaf.endswith(".path")]
