"""Prompt files of other forms: what is taken from them, and what is said about one that cannot be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import omnirl_hpc
from omnirl_hpc.data.conversion import ROWS_AT_ONCE, convert
from omnirl_hpc.data.prompts import PromptTable
from omnirl_hpc.errors import DataError
from tests.tables import (
    PROMPTS,
    write_with_a_nanosecond,
    write_with_latin_metadata,
    write_with_latin_prompt,
)


@pytest.fixture
def converted(tmp_path):
    """Writes a file, converts it, and gives prompt, negative prompt, target and id of each row."""

    def run(name: str, content: str | bytes | pa.Table) -> list[tuple]:
        source, out = tmp_path / name, tmp_path / "out.parquet"
        if isinstance(content, pa.Table):
            pq.write_table(content, source)
        else:
            source.write_bytes(content if isinstance(content, bytes) else content.encode())
        count, with_target = convert(source, out)
        table = PromptTable(out)
        rows = [table[i] for i in range(len(table))]
        assert (len(rows), sum(row.target is not None for row in rows)) == (count, with_target)
        return [(row.prompt, row.negative_prompt, row.target, row.id) for row in rows]

    return run


def test_text_has_a_prompt_a_line_and_its_target_between_quotes(converted):
    lines = [
        'A sign that reads "Open Late"',
        "",
        "  a cat  ",
        'an 8" pan',
        'two "a" and "b"',
        'nothing "" here',
        "café",
    ]
    assert converted("p.txt", "\n".join(lines)) == [
        ('A sign that reads "Open Late"', None, "Open Late", "0"),
        ("a cat", None, None, "1"),
        ('an 8" pan', None, None, "2"),
        ('two "a" and "b"', None, "a", "3"),
        ('nothing "" here', None, None, "4"),
        ("café", None, None, "5"),
    ]


def test_json_lines(converted):
    records = [
        {"prompt": "a", "target": "A", "tag": "x", "include": [{"n": 1}]},
        {"id": 7, "prompt": "b", "negative_prompt": " "},
    ]
    text = "\n".join(map(json.dumps, records)) + "\n\n"
    assert converted("p.jsonl", text) == [("a", None, "A", "0"), ("b", " ", None, "7")]


def test_csv(converted):
    text = 'id,prompt,target,more\nx,"a, b","A ""B""\nC",1\ny,c,,2\n'
    assert converted("p.csv", "\ufeff" + text) == [("a, b", None, 'A "B"\nC', "x"), ("c", None, None, "y")]


def test_a_header_with_spaces(converted):
    """Spaces after the delimiter in the first line are no part of the names, nor of the texts below."""
    text = 'prompt, target , negative_prompt\na cat, CAT,\n"a, b", "A, B", " "\n'
    assert converted("p.csv", text) == [("a cat", None, "CAT", "0"), ("a, b", " ", "A, B", "1")]
    assert converted("q.csv", "prompt,target\na, CAT\n") == [("a", None, " CAT", "0")]


def test_tabs_lists_and_endings_in_upper_case(converted):
    assert converted("p.TSV", "prompt\ttarget\na, b\tA\n") == [("a, b", None, "A", "0")]
    assert converted("p.json", '[{"prompt": "a", "target": "A"}, {"prompt": "b", "id": 7}]') == [
        ("a", None, "A", "0"),
        ("b", None, None, "7"),
    ]
    assert converted("p.PARQUET", pa.table({"prompt": ["a"]})) == [("a", None, None, "0")]


def test_a_folder_of_shards(tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    write_with_latin_metadata(shards / "1.PARQUET")
    write_with_a_nanosecond(shards / "0.parquet")
    (shards / "README.md").touch()
    assert convert(shards, tmp_path / "out.parquet") == (24, 0)
    table = PromptTable(tmp_path / "out.parquet")
    assert [table[row].prompt for row in range(24)] == 2 * PROMPTS
    write_with_latin_prompt(shards / "2.parquet")
    with pytest.raises(DataError, match="2.parquet, row 11: prompt is not UTF-8"):
        convert(shards, tmp_path / "again.parquet")
    with pytest.raises(DataError, match="empty is a folder without \\*.parquet"):
        (tmp_path / "empty").mkdir()
        convert(tmp_path / "empty", tmp_path / "again.parquet")


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-16-le"])
def test_another_encoding_is_read_where_it_is_named(tmp_path, encoding):
    (tmp_path / "p.csv").write_bytes("prompt\nA sign “Open” — café\n".encode(encoding))
    assert convert(tmp_path / "p.csv", tmp_path / "out.parquet", encoding) == (1, 0)
    assert PromptTable(tmp_path / "out.parquet")[0].prompt == "A sign “Open” — café"


@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        ("rot13", "there is no encoding of text named rot13"),
        ("nothing", "there is no encoding of text named nothing"),
        ("ascii", "is not ascii: "),
        ("utf-16", "is not utf-16: "),
    ],
)
def test_an_encoding_that_the_file_is_not_in(tmp_path, encoding, said):
    (tmp_path / "p.csv").write_bytes("prompt\ncafé\n".encode("cp1252"))
    with pytest.raises(DataError, match=said):
        convert(tmp_path / "p.csv", tmp_path / "out.parquet", encoding)
    assert not (tmp_path / "out.parquet").exists()


def test_our_own_parquet(converted):
    table = pa.table({"prompt": ["a", "b"], "target": ["A", None], "level": [1, 2], "image": [b"1", b"2"]})
    assert converted("p.parquet", table) == [("a", None, "A", "0"), ("b", None, None, "1")]


def chat(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


def verl_omni(*prompts: list[dict[str, str]]) -> pa.Table:
    """The columns of verl_omni.md section 6."""
    count = len(prompts)
    return pa.table(
        {
            "data_source": ["ocr"] * count,
            "prompt": list(prompts),
            "negative_prompt": [chat(("user", " "))] * count,
            "ability": ["ocr"] * count,
            "reward_model": [{"style": "model", "ground_truth": f"T{i}"} for i in range(count)],
            "extra_info": [{"split": "train", "index": i} for i in range(count)],
            "images": [[{"bytes": b"x"}]] * count,
        }
    )


def test_the_parquet_of_verl_omni(converted):
    table = verl_omni(chat(("system", "Describe."), ("user", "a")), chat(("user", "b")))
    assert converted("p.parquet", table) == [("a", " ", "T0", "0"), ("b", " ", "T1", "1")]


def test_many_rows_in_row_groups_that_are_read_one_by_one(converted, tmp_path):
    count = 2 * ROWS_AT_ONCE + 1
    rows = converted("p.parquet", verl_omni(*[chat(("user", f"p{i}")) for i in range(count)]))
    assert [row[0] for row in rows] == [f"p{i}" for i in range(count)]
    assert pq.ParquetFile(tmp_path / "out.parquet").metadata.num_row_groups == 3


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.txt", "\n \n", "p.txt has no prompts"),
        ("p.txt", b"a\xff", "p.txt is not UTF-8 in line 1, but looks like "),
        (
            "p.csv",
            "prompt\nok\nA sign “Open” — café\n".encode("cp1252"),
            "p.csv is not UTF-8 in line 3, but looks like cp1252: if 'A sign “Open” — café' is right, add "
            "--encoding cp1252",
        ),
        (
            "p.csv",
            "prompt,target\nA sign “Open”,Open\n".encode("utf-16"),
            "p.csv is not UTF-8 in line 1, but looks like utf_16: if 'prompt,target' is right",
        ),
        (
            "p.csv",  # valid UTF-8, letter by letter
            "prompt,target\na cat,CAT\n".encode("utf-16-le"),
            "p.csv is not UTF-8 in line 1, but looks like utf_16_le: if 'prompt,target' is right",
        ),
        (
            "p.txt",
            "ok\n招牌写着“营业中”，一只猫坐在桌子上\n".encode("gbk"),
            "p.txt is not UTF-8 in line 2, but looks like gb18030: if "
            "'招牌写着“营业中”，一只猫坐在桌子上' is right",
        ),
        ("p.json", '{"prompt": "a"}\n{"prompt": "b"}\n', "p.json is not JSON: Extra data: line 2 column 1"),
        ("p.json", '{"prompt": "a"}', "p.json holds dict, not a list of objects"),
        ("p.json", '[{"prompt": "a"}, 3]', "p.json, entry 2 is int, not an object with a field `prompt`"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": }\n', "p.jsonl, line 2 is not JSON: Expecting value"),
        ("p.jsonl", '["a"]\n', "p.jsonl, line 1 is list, not an object with a field `prompt`"),
        (
            "p.jsonl",
            '{"prompt": "a"}\n{"text": "b"}\n',
            "p.jsonl, line 2 has no field `prompt`; its fields are: text",
        ),
        (
            "p.jsonl",
            '{"prompt": "a", "id": 1}\n{"prompt": "b", "id": "1"}\n',
            "p.jsonl, line 2: the id 1 is that of ",
        ),
        ("p.jsonl", '{"prompt": {"text": "b"}}\n', "p.jsonl, line 1: prompt is dict, not text"),
        (
            "p.jsonl",
            '{"prompt": "a \\ud83d"}\n',
            "p.jsonl, line 1: prompt is not text: it holds half of a character",
        ),
        ("p.csv", "caption,id\na,1\n", "p.csv has no column 'prompt'; its columns are: caption, id"),
        (
            "p.csv",
            "prompt\na cat, asleep\n",
            "p.csv, line 2 has 2 fields, the first line names 1: a text with the delimiter in it",
        ),
        ("p.csv", "prompt,prompt\na,b\n", "p.csv has several columns 'prompt'"),
        ("p.csv", "", "p.csv has no column 'prompt'; its columns are: none"),
        ("p.csv", "id,prompt\n1,a\n2\n", "p.csv, line 3: the prompt is empty"),
        ("p.parquet", b"PAR1", "p.parquet cannot be read as .parquet: "),
        (
            "p.parquet",
            pa.table({"caption": ["a"]}),
            "p.parquet has no column 'prompt'; its columns are: caption",
        ),
        ("p.parquet", pa.table({"prompt": ["a", None]}), "p.parquet, row 1: the prompt is empty"),
        ("p.parquet", pa.table({"prompt": [b"a"]}), "p.parquet, row 0: prompt is bytes, not text"),
        (
            "p.parquet",
            verl_omni(chat(("user", "a"), ("user", "b"))),
            "p.parquet, row 0: prompt is a chat of 2 turns, not one prompt",
        ),
        ("p.parquet", verl_omni(chat(("system", "a"))), "p.parquet, row 0: the prompt is empty"),
        (
            "p.docx",
            "a",
            "p.docx: prompts are read from files whose name ends in .txt, .jsonl, .json, .csv, .tsv, "
            ".parquet",
        ),
    ],
)
def test_what_cannot_be_used_is_named_and_nothing_is_written(converted, tmp_path, name, content, said):
    with pytest.raises(DataError) as error:
        converted(name, content)
    assert str(error.value).startswith(f"{tmp_path}/{said}") and "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


MIB = 1 << 20
COUNT = 3072
LIMIT = 256 * MIB  # Python with pyarrow takes 62; the file has 3 GB, in one row group


def write_huge(file: Path, prompt: pa.ChunkedArray) -> None:
    """3 GB in one row group: bytes, and bytes in structs in lists, 1 MiB a row, beside the prompts."""
    columns = {
        "prompt": prompt,
        "reward_model": repeated({"style": "rule", "ground_truth": "hi"}),
        "target": repeated("hi"),
        "images": repeated([{"bytes": os.urandom(MIB // 2)}]),
        "raw": repeated(os.urandom(MIB // 2)),
    }
    pq.write_table(
        pa.table(columns),
        file,
        row_group_size=COUNT,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
    )
    assert pq.ParquetFile(file).metadata.num_row_groups == 1 and file.stat().st_size > 3e9


def repeated(row: object) -> pa.ChunkedArray:
    """One buffer in memory, COUNT rows in the file."""
    return pa.chunked_array([pa.array([row])] * COUNT)


READS = """
from omnirl_hpc.data.prompts import PromptTable
table = PromptTable("huge.parquet")
assert [table[i].prompt for i in (0, 3071, 17)] == ["prompt 0", "prompt 3071", "prompt 17"]
assert table[5].metadata == {} and all(prompt.target == "hi" for _, prompt in table.scan())
"""
CONVERTS = """
from omnirl_hpc.cli.main import main
main(["prompts", "out.parquet", "--from", "huge.parquet"])
"""


def peak_memory(program: str, folder: Path) -> int:
    """Bytes that a Python of its own needed at most. Not ru_maxrss, which a program inherits from the one
    that started it.
    """
    program += (
        "\nprint(*[int(line.split()[1]) * 1024 for line in open('/proc/self/status') "
        "if line.startswith('VmHWM')])"
    )
    environ = {"PYTHONPATH": ":".join([str(Path(omnirl_hpc.__file__).parent.parent), *sys.path])}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, cwd=folder
    )
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout.split()[-1])


@pytest.fixture
def huge(tmp_path):
    yield tmp_path / "huge.parquet"
    (tmp_path / "huge.parquet").unlink()  # pytest keeps the folders of three runs


@pytest.mark.slow
def test_training_reads_a_huge_table_in_bounded_memory(huge):
    write_huge(huge, pa.chunked_array([[f"prompt {i}" for i in range(COUNT)]]))
    assert peak_memory(READS, huge.parent) < LIMIT


@pytest.mark.slow
def test_a_huge_file_is_converted_in_bounded_memory(huge):
    write_huge(huge, repeated(chat(("system", "Describe."), ("user", "a sign that says hi"))))
    assert peak_memory(CONVERTS, huge.parent) < LIMIT
    table = PromptTable(huge.parent / "out.parquet")
    assert (
        len(table) == COUNT and table[COUNT - 1].prompt == "a sign that says hi" and table[0].target == "hi"
    )
