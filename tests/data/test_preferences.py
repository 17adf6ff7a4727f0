"""Tables of preferences: rows are prompts with two samples that are read when they are asked for."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnirl_hpc.data.preferences import PreferenceTable
from omnirl_hpc.errors import DataError


def image(data: bytes | None) -> dict | None:
    return None if data is None else {"bytes": data, "path": None}


def test_images(tmp_path):
    path = tmp_path / "pairs.parquet"
    columns = {
        "prompt": ["a", "b"],
        "id": ["x", "y"],
        "chosen": [image(b"1"), image(b"2")],
        "rejected": [image(b"3"), None],
        "sketch": [image(b"5"), image(b"6")],
    }
    pq.write_table(pa.table(columns), path)
    table = PreferenceTable(path)
    row = table[0]
    assert (row.prompt, row.id, len(table)) == ("a", "x", 2)
    assert (row.chosen.read(), row.rejected.read()) == (b"1", b"3")
    assert not row.chosen.holds_latents
    assert list(row.media) == ["sketch"]  # the samples are nothing that the model reads
    with pytest.raises(
        DataError, match=r"pairs.parquet, row group 0, row 1, column rejected: there is no image"
    ):
        table[1]


def test_latents_are_preferred_to_images(tmp_path):
    path = tmp_path / "pairs.parquet"
    columns = {
        "prompt": ["a", "b", "c"],
        "chosen_latents": [b"1", b"2", b"3"],
        "rejected_latents": [b"4", b"5", None],
        "chosen": [image(b"x")] * 3,
        "rejected": [image(b"y")] * 3,
    }
    pq.write_table(pa.table(columns), path, row_group_size=2)
    table = PreferenceTable(path)
    assert [table[row].chosen.read() for row in range(3)] == [b"1", b"2", b"3"]
    assert table[1].rejected.read() == b"5" and table[1].rejected.holds_latents
    with pytest.raises(DataError, match="row group 1, row 2, column rejected_latents: there are no latents"):
        table[2].rejected.read()


def test_a_table_without_pairs_names_its_columns(tmp_path):
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "chosen": ["a.png"]}), path)
    with pytest.raises(DataError, match=r"has no pairs: .* its columns are: prompt, chosen$"):
        PreferenceTable(path)
