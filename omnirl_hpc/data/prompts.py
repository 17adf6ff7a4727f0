"""A prompt table in parquet, of which the columns in use are read, one row group at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omnirl_hpc.errors import DataError

TEXT_COLUMNS = ("prompt", "negative_prompt", "target", "id")  # all but the first are optional
CACHED_ROW_GROUPS = 8
TEXT_FORMS = (".txt", ".jsonl", ".json", ".csv", ".tsv")  # which `omnirl-hpc prompts` converts


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
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)  # the columns that rewards ask for
    place: str = field(default="", compare=False)  # file, row group and row, for errors
    # What the prompt comes with besides text: the name of a column -> its images, videos or sounds.
    media: dict[str, tuple[MediaRef, ...]] = field(default_factory=dict, hash=False, repr=False)


@dataclass(frozen=True)
class Undecodable:
    """Stands for a value that Python has none for."""

    why: str  # follows the name of the column


class PromptTable:
    """Random access to the rows of a parquet file without ever holding the whole file.

    Required column: `prompt` (text). Optional: `negative_prompt`, `target` (text), `id` (text or numbers),
    and the columns of numbers or text that are asked for as metadata. A column of {bytes, path}, or of lists
    of them, as the library datasets writes images, videos and sounds, becomes media: of it only the paths are
    read, since the bytes may be larger than memory. No other column is read: it may be damaged.
    """

    def __init__(self, path: str | Path, metadata: Sequence[str] = ()) -> None:
        """Raises DataError for a file that is no such table."""
        self.path = Path(path)
        try:
            self._file = pq.ParquetFile(self.path)
        except (OSError, pa.ArrowException) as error:
            hint = f" ({self._conversion} converts it)" if self._can_be_converted else ""
            raise DataError(f"{self.path} cannot be read as parquet: {error}{hint}") from None
        schema = self._file.schema_arrow
        require_columns(self.path, schema.names, metadata)
        for column in TEXT_COLUMNS[:-1]:
            if column in schema.names and not _is_text(schema.field(column).type):
                held = schema.field(column).type
                raise DataError(
                    f"{self.path}: the column {column!r} holds {held}, not text; {self._conversion} converts "
                    "the forms of other systems"
                )
        for column in ("id", *metadata):
            if column in schema.names and not _is_plain(schema.field(column).type):
                held = schema.field(column).type
                raise DataError(f"{self.path}: the column {column!r} holds {held}, neither text nor numbers")
        self._columns = [name for name in schema.names if name in (*TEXT_COLUMNS, *metadata)]
        self._media_columns = {field.name for field in schema if _is_media(field.type)}
        self._read_columns = [*self._columns, *_path_columns(self._file, self._media_columns)]
        file = self._file.metadata
        self._ends = np.cumsum([file.row_group(i).num_rows for i in range(file.num_row_groups)])
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
        (record,) = _records(self._row_group(group).slice(offset, 1))
        return self._prompt(record, group, row)

    def scan(self) -> Iterator[tuple[str, Prompt | DataError]]:
        """The place of every row and its prompt, or the error that says why it cannot be used."""
        first = 0
        for group, end in enumerate(map(int, self._ends)):
            try:
                records = _records(self._row_group(group))
            except DataError as error:
                why = str(error).removeprefix(f"{self.path}, row group {group}: ")
                for place in (self._place(group, row) for row in range(first, end)):
                    yield place, DataError(f"{place}: {why}")
            else:
                for row, record in enumerate(records, first):
                    try:
                        yield self._place(group, row), self._prompt(record, group, row)
                    except DataError as error:
                        yield self._place(group, row), error
            first = end

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

    def _prompt(self, record: dict[str, Any], group: int, row: int) -> Prompt:
        place = self._place(group, row)
        for name, value in record.items():
            if isinstance(value, Undecodable):
                raise DataError(f"{place}: {name} {value.why}")
        text = {name: record.pop(name, None) for name in TEXT_COLUMNS}
        if not (text["prompt"] or "").strip():
            raise DataError(f"{place}: the prompt is empty")
        offset = row - (int(self._ends[group - 1]) if group else 0)
        media = {name: self._media(group, offset, name, record.pop(name)) for name in self._media_columns}
        return Prompt(
            id=str(row) if text["id"] is None else str(text["id"]),
            prompt=text["prompt"],
            negative_prompt=text["negative_prompt"],
            target=text["target"],
            metadata=record,
            place=place,
            media={name: refs for name, refs in media.items() if refs},
        )

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
    def _can_be_converted(self) -> bool:
        return self.path.is_dir() or self.path.suffix.lower() in TEXT_FORMS

    @property
    def _conversion(self) -> str:
        return f"omnirl-hpc prompts OUT.parquet --from {self.path}"

    def _place(self, group: int, row: int) -> str:
        return f"{self.path}, row group {group}, row {row}"


def require_columns(path: Path, columns: Sequence[str], metadata: Sequence[str] = ()) -> None:
    """Raise DataError where a table has no `prompt`, lacks metadata, or has a column in use twice."""
    if "prompt" not in columns:
        raise DataError(f"{path} has no column 'prompt'; its columns are: {', '.join(columns) or 'none'}")
    if lacking := [name for name in metadata if name not in columns]:
        raise DataError(
            f"{path} has no column {lacking[0]!r}, which a reward reads; its columns are: "
            f"{', '.join(columns)}"
        )
    if twice := [name for name in (*TEXT_COLUMNS, *metadata) if columns.count(name) > 1]:
        raise DataError(f"{path} has several columns {twice[0]!r}: name each one differently")


def decode(values: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Python's values of a column, with an Undecodable in place of each that has none."""
    try:
        return values.to_pylist()
    except (ValueError, OverflowError):
        return [_decode_value(value) for value in values]


def _decode_value(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return Undecodable(f"is not UTF-8 (byte 0x{error.object[error.start]:02x})")
    except (ValueError, OverflowError) as error:  # such as a time with nanoseconds
        return Undecodable(f"cannot be read: {' '.join(str(error).split())}")


def _records(table: pa.Table) -> list[dict[str, Any]]:
    columns = {name: decode(table.column(name)) for name in table.schema.names}
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_null(kind)
    )


def _is_plain(kind: pa.DataType) -> bool:
    """Text, or numbers whose text is the same in every version of pyarrow."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return (
        _is_text(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def _is_media(kind: pa.DataType) -> bool:
    """{bytes, path}, or a list of them."""
    item = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind
    return pa.types.is_struct(item) and {field.name for field in item} == {"bytes", "path"}


def _path_columns(file: pq.ParquetFile, columns: set[str]) -> list[str]:
    """The leaves of media columns that hold paths: a row group can be read without its bytes."""
    leaves = [file.schema.column(i).path for i in range(len(file.schema))]
    return [leaf for leaf in leaves if leaf.split(".")[0] in columns and leaf.endswith(".path")]
