"""Prompt tables as other programs write them, with what Python cannot read in a column or a row."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

PROMPTS = [f"a cat {i}" for i in range(12)]


def raw_text(values: list[bytes]) -> pa.StringArray:
    """A column of text with these bytes, UTF-8 or not."""
    _, offsets, data = pa.array(values, pa.binary()).buffers()
    return pa.StringArray.from_buffers(len(values), offsets, data)


def write_with_a_nanosecond(file: Path) -> Path:
    """A time that Python has no value for, in a column that nobody uses, in row 7."""
    times = [1_700_000_000_000_000_000 + (row == 7) for row in range(12)]
    pq.write_table(pa.table({"prompt": PROMPTS, "created": pa.array(times, pa.timestamp("ns"))}), file)
    return file


def write_with_latin_metadata(file: Path) -> Path:
    """Text that is not UTF-8 in a column that nobody uses, in row 7."""
    sources = raw_text([b"web"] * 7 + [b"caf\xe9"] + [b"web"] * 4)
    pq.write_table(pa.table({"prompt": PROMPTS, "source": sources}), file)
    return file


def write_with_latin_prompt(file: Path) -> Path:
    """A prompt that is not UTF-8 in the last row, which is the last of the second row group."""
    prompts = raw_text([prompt.encode() for prompt in PROMPTS[:-1]] + [b"a caf\xe9"])
    pq.write_table(pa.table({"prompt": prompts}), file, row_group_size=6)
    return file


def write_with_two_columns_of_a_name(file: Path) -> Path:
    pq.write_table(pa.table([pa.array(PROMPTS), pa.array(PROMPTS)], names=["prompt", "prompt"]), file)
    return file
