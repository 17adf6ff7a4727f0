"""Prompt tables: what is read, when, and what is said about a table that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnirl_hpc.data.prompts import CACHED_ROW_GROUPS, Prompt, PromptTable
from omnirl_hpc.errors import DataError
from tests.tables import (
    PROMPTS,
    write_with_a_nanosecond,
    write_with_latin_metadata,
    write_with_latin_prompt,
    write_with_two_columns_of_a_name,
)


def write(tmp_path: Path, rows_per_group: int = 2, **columns) -> Path:
    file = tmp_path / "table.parquet"
    pq.write_table(pa.table(columns), file, row_group_size=rows_per_group)
    return file


def test_every_column_finds_its_place(tmp_path):
    file = write(
        tmp_path,
        prompt=["a cat"],
        negative_prompt=["blurry"],
        target=["CAT"],
        id=["x7"],
        style=["ink"],
        level=[3],
    )
    assert PromptTable(file)[0] == Prompt("x7", "a cat", "blurry", "CAT", {})
    assert PromptTable(file, ["level", "style"])[0] == Prompt(
        "x7", "a cat", "blurry", "CAT", {"style": "ink", "level": 3}
    )


def test_optional_columns_and_ids_that_default_to_row_numbers(tmp_path):
    table = PromptTable(write(tmp_path, prompt=["a", "b", "c"]))
    assert [table[i] for i in range(len(table))] == [Prompt("0", "a"), Prompt("1", "b"), Prompt("2", "c")]
    assert [
        PromptTable(write(tmp_path, prompt=["a", "b", "c"], id=[10, None, 30]))[i].id for i in range(3)
    ] == ["10", "1", "30"]


def test_row_groups_are_read_when_needed_and_kept(tmp_path, monkeypatch):
    table = PromptTable(write(tmp_path, prompt=[f"p{i}" for i in range(40)]))  # 20 row groups of 2
    reads = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda self, i, *a, **k: reads.append(i) or read(self, i, *a, **k)
    )
    assert [table[i].prompt for i in (5, 4, 5)] == ["p5", "p4", "p5"]
    assert reads == [2]
    for group in range(CACHED_ROW_GROUPS):
        table[30 - 2 * group]
    table[5]  # row group 2 has been dropped: no more than CACHED_ROW_GROUPS are held
    assert reads.count(2) == 2 and len(reads) == CACHED_ROW_GROUPS + 2


def test_rows_of_uneven_and_empty_row_groups(tmp_path):
    schema = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(tmp_path / "t.parquet", schema) as writer:
        for names in (["a"], [], ["b", "c", "d"], [], ["e"]):
            writer.write_table(pa.table({"prompt": names}, schema=schema))
    table = PromptTable(tmp_path / "t.parquet")
    assert [table[i].prompt for i in range(len(table))] == ["a", "b", "c", "d", "e"]


def test_a_row_outside_the_table(tmp_path):
    table = PromptTable(write(tmp_path, prompt=["a"]))
    for row in (1, -1):
        with pytest.raises(IndexError):
            table[row]


def test_unreadable_files(tmp_path):
    (tmp_path / "text.parquet").write_text("prompt\na cat\n")
    for path in (tmp_path / "text.parquet", tmp_path / "missing.parquet", tmp_path):
        with pytest.raises(DataError, match=f"{path} cannot be read as parquet"):
            PromptTable(path)


def test_a_damaged_row_group_is_named(tmp_path):
    file = write(tmp_path, prompt=["abc" * 20, "def" * 20, "ghi" * 20])
    data = bytearray(file.read_bytes())
    data[4:24] = b"\xff" * 20  # the first page; the footer at the end stays whole
    file.write_bytes(data)
    table = PromptTable(file)
    assert table[2].prompt == "ghi" * 20
    with pytest.raises(DataError, match=f"{file}, row group 0"):
        table[0]


def test_missing_column_and_missing_rows(tmp_path):
    with pytest.raises(DataError, match="no column 'prompt'; its columns are: caption, id"):
        PromptTable(write(tmp_path, caption=["a"], id=["1"]))
    with pytest.raises(DataError, match="has no rows"):
        PromptTable(write(tmp_path, prompt=pa.array([], pa.string())))


@pytest.mark.parametrize("make", [write_with_a_nanosecond, write_with_latin_metadata])
def test_columns_that_nobody_uses_are_not_decoded(tmp_path, make):
    table = PromptTable(make(tmp_path / "t.parquet"))
    assert [table[row].prompt for row in range(12)] == PROMPTS
    assert [prompt.prompt for _, prompt in table.scan()] == PROMPTS


@pytest.mark.parametrize(
    ("make", "column", "why"),
    [
        (write_with_latin_metadata, "source", "source is not UTF-8 (byte 0xe9)"),
        (write_with_latin_prompt, None, "prompt is not UTF-8 (byte 0xe9)"),
    ],
)
def test_a_row_that_cannot_be_decoded_is_an_error_with_its_place(tmp_path, make, column, why):
    table = PromptTable(make(tmp_path / "t.parquet"), [column] if column else [])
    bad = [(place, str(prompt)) for place, prompt in table.scan() if isinstance(prompt, DataError)]
    ((place, said),) = bad
    assert said == f"{place}: {why}"
    row = int(place.rpartition(" ")[2])
    assert place == f"{table.path}, row group {0 if column else 1}, row {row}" and row in (7, 11)
    with pytest.raises(DataError) as error:
        table[row]
    assert str(error.value) == said
    assert table[row - 1].prompt == PROMPTS[row - 1]


def test_a_column_twice(tmp_path):
    with pytest.raises(DataError, match="has several columns 'prompt': name each one differently$"):
        PromptTable(write_with_two_columns_of_a_name(tmp_path / "t.parquet"))
    names = ["prompt", "style", "style"]
    pq.write_table(pa.table([["a"], ["b"], ["c"]], names=names), tmp_path / "t.parquet")
    assert PromptTable(tmp_path / "t.parquet")[0].prompt == "a"  # nobody asks for it
    with pytest.raises(DataError, match="has several columns 'style'"):
        PromptTable(tmp_path / "t.parquet", ["style"])


def test_metadata_that_is_not_there_or_neither_text_nor_numbers(tmp_path):
    file = write(tmp_path, prompt=["a"], level=[0.5], tags=[["x"]], image=[b"1"], info=[{"n": 1}])
    assert PromptTable(file, ["level"])[0].metadata == {"level": 0.5}
    for column, kind in (("tags", "list<"), ("image", "binary"), ("info", "struct<")):
        with pytest.raises(
            DataError, match=f"the column '{column}' holds {kind}.*, neither text nor numbers"
        ):
            PromptTable(file, [column])
    with pytest.raises(
        DataError, match="has no column 'style', which a reward reads; its columns are: prompt, "
    ):
        PromptTable(file, ["style"])


def test_an_id_is_text_or_a_number(tmp_path):
    with pytest.raises(DataError, match=r"the column 'id' holds timestamp\[ns\], neither text nor numbers"):
        PromptTable(write(tmp_path, prompt=["a"], id=pa.array([1], pa.timestamp("ns"))))


def test_a_file_of_another_form_names_the_command_that_converts_it(tmp_path):
    for name in ("p.CSV", "p.tsv", "p.json"):
        (tmp_path / name).write_text("prompt\n")
        with pytest.raises(DataError, match=rf"omnirl-hpc prompts OUT.parquet --from \S+{name} converts it"):
            PromptTable(tmp_path / name)


def test_the_table_of_another_system_names_the_command_that_converts_it(tmp_path):
    with pytest.raises(
        DataError,
        match=r"'prompt' holds list<.*>, not text; omnirl-hpc prompts OUT.parquet --from \S+ converts",
    ):
        PromptTable(write(tmp_path, prompt=[[{"role": "user", "content": "a"}]]))


@pytest.mark.parametrize("empty", ["", "  \n", None])
def test_an_empty_prompt_names_its_place(tmp_path, empty):
    table = PromptTable(write(tmp_path, prompt=["a", "b", "c", empty]))
    assert table[2].prompt == "c"
    with pytest.raises(DataError, match=r"table.parquet, row group 1, row 3: the prompt is empty"):
        table[3]


@pytest.mark.parametrize(
    ("column", "values", "kind"),
    [
        ("prompt", [1, 2], "int"),
        ("target", [b"x", b"y"], "binary"),
        ("negative_prompt", [["a"], ["b"]], "list"),
    ],
)
def test_a_column_that_is_not_text_is_found_at_once(tmp_path, column, values, kind):
    with pytest.raises(DataError, match=f"the column '{column}' holds {kind}.*, not text"):
        PromptTable(write(tmp_path, **({"prompt": ["a", "b"]} | {column: values})))


class TestMedia:
    """Columns of {bytes, path}, as the library datasets writes them."""

    @pytest.fixture
    def table(self, tmp_path) -> PromptTable:
        (tmp_path / "clips").mkdir()
        (tmp_path / "clips" / "a.wav").write_bytes(b"sound")
        return PromptTable(
            write(
                tmp_path,
                prompt=["a", "b", "c"],
                image=[{"bytes": b"first", "path": "x.png"}, None, {"bytes": b"third", "path": None}],
                frames=[[{"bytes": b"0", "path": None}, {"bytes": b"1", "path": None}], [], None],
                sound=[None, {"bytes": None, "path": "clips/a.wav"}, {"bytes": None, "path": "gone.wav"}],
                level=[1, 2, 3],
            ),
            metadata=["level"],
        )

    def test_they_are_read_when_they_are_asked_for(self, table):
        rows = [table[i] for i in range(3)]
        held = [{name: [ref.read() for ref in refs] for name, refs in row.media.items()} for row in rows[:2]]
        assert held == [{"image": [b"first"], "frames": [b"0", b"1"]}, {"sound": [b"sound"]}]
        assert rows[2].media["image"][0].read() == b"third"
        assert [row.metadata for row in rows] == [{"level": 1}, {"level": 2}, {"level": 3}]

    def test_a_row_is_read_without_their_bytes(self, table, monkeypatch):
        asked = []
        read = pq.ParquetFile.read_row_group
        monkeypatch.setattr(
            pq.ParquetFile,
            "read_row_group",
            lambda self, i, columns: asked.extend(columns) or read(self, i, columns=columns),
        )
        table[0]
        assert "image.path" in asked and not [column for column in asked if column.endswith("bytes")]

    def test_a_file_that_is_not_there_is_named(self, table):
        with pytest.raises(DataError, match=r"row 0 of it, column sound: gone.wav cannot be read"):
            table[2].media["sound"][0].read()

    def test_they_are_part_of_what_a_prompt_is(self, table):
        assert table[0] != Prompt("0", "a", metadata={"level": 1})
        assert table[0] == table[0]
