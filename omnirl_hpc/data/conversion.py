"""Prompt files of other forms and other systems, turned into the table that training reads."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from omnirl_hpc.data.encoding import require_encoding
from omnirl_hpc.data.prompts import TEXT_COLUMNS, Undecodable, decode, require_columns
from omnirl_hpc.errors import DataError

SCHEMA = pa.schema([(name, pa.string()) for name in TEXT_COLUMNS])
# verl and verl-omni: the target lies in a column of structs, of which only this leaf is read
GROUND_TRUTH = "reward_model.ground_truth"
ROWS_AT_ONCE = 256  # read, and in a row group written


def convert(source: Path, out: Path, encoding: str | None = None) -> tuple[int, int]:
    """Write the prompts of `source` to the parquet file `out`, row by row; returns how many there are and how
    many have a target.

    Forms, by the end of the name: .txt with a prompt a line, the target being what stands between the first
    double quotes (flow_grpo); .jsonl, .json (a list), .csv and .tsv with fields named like our columns;
    .parquet with our columns or verl-omni's (prompt and negative_prompt as chats, reward_model.ground_truth),
    or a folder of such files. Everything else in the file is left out; columns of parquet that are not used
    are not read. `encoding` is that of a text file; None is UTF-8.

    Raises DataError naming file and row for what cannot be used; nothing is written then.
    """
    partial = out.with_name(out.name + ".partial")
    count, with_target = 0, 0
    rows: list[dict[str, str | None]] = []
    places: dict[str, str] = {}
    try:
        with pq.ParquetWriter(partial, SCHEMA) as writer:
            for place, record in _records(source, encoding):
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


def _records(source: Path, encoding: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and fields of each prompt."""
    suffix = source.suffix.lower()
    try:
        if source.is_dir():
            yield from _read_shards(source)
        elif suffix == ".parquet":
            yield from _read_parquet(source)
        elif suffix in TEXT_READERS:
            require_encoding(source, encoding)
            with source.open(encoding=encoding or "utf-8-sig", newline="") as file:
                yield from TEXT_READERS[suffix](source, file)
        else:
            known = ", ".join((*TEXT_READERS, ".parquet"))
            raise DataError(f"{source}: prompts are read from files whose name ends in {known}")
    except (OSError, csv.Error, pa.ArrowException) as error:
        raise DataError(f"{source} cannot be read as {suffix}: {' '.join(str(error).split())}") from None


def _read_shards(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parquet files of a folder, in the order of their names."""
    shards = sorted(file for file in folder.iterdir() if file.suffix.lower() == ".parquet")
    if not shards:
        raise DataError(f"{folder} is a folder without *.parquet")
    for shard in shards:
        yield from _read_parquet(shard)


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
    if isinstance(value, Undecodable):
        raise DataError(f"{what} {value.why}")
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


def _read_text(source: Path, file: TextIO) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        if prompt := line.strip():
            quoted = prompt.split('"')
            target = quoted[1] if len(quoted) > 2 else None
            yield f"{source}, line {number}", {"prompt": prompt, "target": target}


def _read_json_lines(source: Path, file: TextIO) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        place = f"{source}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{place} is not JSON: {error}") from None
        yield place, _require_object(record, place)


def _read_json(source: Path, file: TextIO) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        records = json.load(file)
    except json.JSONDecodeError as error:
        hint = "; with an object a line its name ends in .jsonl" if error.msg == "Extra data" else ""
        raise DataError(f"{source} is not JSON: {error}{hint}") from None
    if not isinstance(records, list):
        raise DataError(f"{source} holds {type(records).__name__}, not a list of objects")
    for number, record in enumerate(records, 1):
        place = f"{source}, entry {number}"
        yield place, _require_object(record, place)


def _require_object(record: Any, place: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise DataError(f"{place} is {type(record).__name__}, not an object with a field `prompt`")
    if "prompt" not in record:
        raise DataError(f"{place} has no field `prompt`; its fields are: {', '.join(record)}")
    return record


def _read_csv(source: Path, file: TextIO, delimiter: str = ",") -> Iterator[tuple[str, dict[str, Any]]]:
    header = next(csv.reader(file, delimiter=delimiter), [])
    columns = [name.strip() for name in header]
    require_columns(source, columns)
    # A space after the delimiter belongs to no text where the first line has it, too.
    spaced = any(name.startswith(" ") for name in header)
    reader = csv.DictReader(file, columns, delimiter=delimiter, skipinitialspace=spaced)
    for record in reader:
        place = f"{source}, line {reader.line_num + 1}"
        if None in record:  # where DictReader puts what is too much
            raise DataError(
                f"{place} has {len(columns) + len(record[None])} fields, the first line names "
                f"{len(columns)}: a "
                "text with the delimiter in it stands between double quotes"
            )
        yield place, record


def _read_tsv(source: Path, file: TextIO) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from _read_csv(source, file, delimiter="\t")


def _read_parquet(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    # Buffered: otherwise a column is read whole, row group by row group.
    with pq.ParquetFile(source, buffer_size=1 << 20) as file:
        require_columns(source, file.schema_arrow.names)
        # In batches: pyarrow cannot put a nested column of more than 2 GiB into one array.
        row = 0
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=[*TEXT_COLUMNS, GROUND_TRUTH]):
            columns = {name: decode(batch.column(name)) for name in batch.schema.names}
            for values in zip(*columns.values()):
                yield f"{source}, row {row}", dict(zip(columns, values))
                row += 1


TEXT_READERS: dict[str, Callable[[Path, TextIO], Iterator[tuple[str, dict[str, Any]]]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
}
