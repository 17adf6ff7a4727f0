"""Prompt files of other forms and other systems, turned into the table that training reads."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from omnirl_hpc.data.prompts import TEXT_COLUMNS
from omnirl_hpc.errors import DataError

SCHEMA = pa.schema([(name, pa.string()) for name in TEXT_COLUMNS])
# verl and verl-omni: the target lies in a column of structs, of which only this leaf is read
GROUND_TRUTH = "reward_model.ground_truth"
ROWS_AT_ONCE = 256  # read, and in a row group written


def convert(source: Path, out: Path) -> tuple[int, int]:
    """Write the prompts of `source` to the parquet file `out`, row by row; returns how many there are and how
    many have a target.

    Forms, by the end of the name: .txt with a prompt a line, the target being what stands between the first
    double quotes (flow_grpo); .jsonl and .csv with fields named like our columns; .parquet with our columns
    or verl-omni's (prompt and negative_prompt as chats, reward_model.ground_truth). Everything else in the
    file is left out, and nested columns and bytes are not even read.

    Raises DataError naming file and row for what cannot be used; nothing is written then.
    """
    if source.suffix not in READERS:
        raise DataError(f"{source}: prompts are read from files whose name ends in {', '.join(READERS)}")
    partial = out.with_name(out.name + ".partial")
    count, with_target, rows, places = 0, 0, [], {}
    try:
        with pq.ParquetWriter(partial, SCHEMA) as writer:
            for place, record in _records(source):
                rows.append(_row(record, place))
                if (identity := rows[-1]["id"]) is not None and places.setdefault(identity, place) != place:
                    raise DataError(f"{place}: the id {identity} is that of {places[identity]}, too")
                count += 1
                with_target += rows[-1]["target"] is not None
                if len(rows) == ROWS_AT_ONCE:
                    writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
                    rows.clear()
            if rows:
                writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
        if not count:
            raise DataError(f"{source} has no prompts")
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    return count, with_target


def _records(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and fields of each prompt."""
    try:
        yield from READERS[source.suffix](source)
    except UnicodeDecodeError:
        raise DataError(
            f"{source} is not UTF-8 in line {_first_bad_line(source)}: iconv -f LATIN1 -t UTF-8 converts it"
        ) from None
    except (OSError, csv.Error, pa.ArrowException) as error:
        raise DataError(
            f"{source} cannot be read as {source.suffix}: {' '.join(str(error).split())}"
        ) from None


def _first_bad_line(source: Path) -> int:
    with source.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                break
    return number


def _row(record: dict[str, Any], place: str) -> dict[str, str | None]:
    row = {name: _text(record.get(name), f"{place}: {name}") for name in TEXT_COLUMNS}
    if row["target"] is None and isinstance(record.get("reward_model"), dict):
        row["target"] = _text(record["reward_model"].get("ground_truth"), f"{place}: {GROUND_TRUTH}")
    if not (row["prompt"] or "").strip():
        raise DataError(f"{place}: the prompt is empty")
    return row


def _text(value: Any, what: str) -> str | None:
    """Text, a number, or what the user says in a chat of one turn; nothing where it is blank (a negative
    prompt may be " ").
    """
    if isinstance(value, list) and all(isinstance(message, dict) and "role" in message for message in value):
        said = [message.get("content") for message in value if message["role"] == "user"]
        if len(said) > 1:
            raise DataError(f"{what} is a chat of {len(said)} turns, not one prompt")
        value = said[0] if said else None
    if value is None or value == "":
        return None
    if not isinstance(value, (str, int, float)):
        raise DataError(f"{what} is {type(value).__name__}, not text")
    try:
        str(value).encode()
    except UnicodeEncodeError:  # JSON can name half of a character, as where a text was cut
        raise DataError(f"{what} is not text: it holds half of a character") from None
    return str(value)


def _read_text(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with source.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if prompt := line.strip():
                quoted = prompt.split('"')
                yield (
                    f"{source}, line {number}",
                    {"prompt": prompt, "target": quoted[1] if len(quoted) > 2 else None},
                )


def _read_json_lines(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with source.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{source}, line {number} is not JSON: {error}") from None
            if not isinstance(record, dict):
                raise DataError(
                    f"{source}, line {number} is {type(record).__name__}, not an object with a field `prompt`"
                )
            if "prompt" not in record:
                raise DataError(
                    f"{source}, line {number} has no field `prompt`; its fields are: {', '.join(record)}"
                )
            yield f"{source}, line {number}", record


def _read_csv(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with source.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or ())
        _require_prompt(source, columns)
        for record in reader:
            if None in record:  # where DictReader puts what is too much
                raise DataError(
                    f"{source}, line {reader.line_num} has {len(columns) + len(record[None])} fields, the first line names "
                    f"{len(columns)}: a text with a comma stands between double quotes"
                )
            yield f"{source}, line {reader.line_num}", record


def _read_parquet(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    # Buffered: otherwise a column is read whole, row group by row group.
    with pq.ParquetFile(source, buffer_size=1 << 20) as file:
        _require_prompt(source, file.schema_arrow.names)
        # In batches: pyarrow cannot put a nested column of more than 2 GiB into one array.
        row = 0
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=[*TEXT_COLUMNS, GROUND_TRUTH]):
            for record in batch.to_pylist():
                yield f"{source}, row {row}", record
                row += 1


def _require_prompt(source: Path, columns: list[str]) -> None:
    if "prompt" not in columns:
        raise DataError(f"{source} has no column 'prompt'; its columns are: {', '.join(columns) or 'none'}")
    if twice := [name for name in TEXT_COLUMNS if columns.count(name) > 1]:
        raise DataError(f"{source} has several columns {twice[0]!r}")


READERS: dict[str, Callable[[Path], Iterator[tuple[str, dict[str, Any]]]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
