"""A table of preferences in parquet: prompts, each with a sample that is preferred and one that is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omnirl_hpc.data.prompts import Prompt, PromptTable
from omnirl_hpc.errors import DataError

IMAGES = ("chosen", "rejected")  # columns of {bytes, path}, as the library datasets writes images
LATENTS = ("chosen_latents", "rejected_latents")  # columns of bytes: safetensors, a tensor for each stream


@dataclass(frozen=True)
class SampleFile:
    """A sample in a row, read when it is asked for."""

    place: str  # for errors
    holds_latents: bool
    read: Callable[[], bytes]

    def __str__(self) -> str:
        return self.place


@dataclass(frozen=True, kw_only=True)
class Preference(Prompt):
    """One row. The two samples are not among the prompt's media, which a model reads."""

    chosen: SampleFile = field(compare=False)
    rejected: SampleFile = field(compare=False)


class PreferenceTable(PromptTable):
    """The rows of a PromptTable that also has the columns `chosen` and `rejected`, or `chosen_latents` and
    `rejected_latents`; latents are taken where both are there.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises DataError for a table without pairs."""
        super().__init__(path)
        schema = self._file.schema_arrow
        held = {column.name for column in schema if _is_bytes(column.type)}
        self._holds_latents = held.issuperset(LATENTS)
        if not self._holds_latents and not self._media_columns.issuperset(IMAGES):
            raise DataError(
                f"{self.path} has no pairs: neither images in the columns {' and '.join(IMAGES)} "
                f"({{bytes, path}}) nor latents in {' and '.join(LATENTS)} (bytes); its columns are: "
                f"{', '.join(schema.names)}"
            )

    def __getitem__(self, row: int) -> Preference:
        prompt = super().__getitem__(row)
        names = LATENTS if self._holds_latents else IMAGES
        chosen, rejected = (self._file_of(row, prompt, name) for name in names)
        values = {part.name: getattr(prompt, part.name) for part in fields(prompt)}
        values["media"] = {name: media for name, media in prompt.media.items() if name not in IMAGES}
        return Preference(**values, chosen=chosen, rejected=rejected)

    def _file_of(self, row: int, prompt: Prompt, column: str) -> SampleFile:
        place = f"{prompt.place}, column {column}"
        if self._holds_latents:
            return SampleFile(place, True, lambda: self._read_bytes(row, column, place))
        if not prompt.media.get(column):
            raise DataError(f"{place}: there is no image")
        return SampleFile(place, False, prompt.media[column][0].read)

    def _read_bytes(self, row: int, column: str, place: str) -> bytes:
        group = int(np.searchsorted(self._ends, row, side="right"))
        offset = row - (int(self._ends[group - 1]) if group else 0)
        with pq.ParquetFile(self.path) as file:
            held = file.read_row_group(group, columns=[column])[column][offset].as_py()
        if held is None:
            raise DataError(f"{place}: there are no latents")
        return held


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
