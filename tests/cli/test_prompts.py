"""`omnirl-hpc prompts --check`: what a job would meet in some later hour is found now."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnirl_hpc.checks.data import check_prompt_lengths, check_prompts
from omnirl_hpc.cli.main import main
from omnirl_hpc.config.load import load_config
from omnirl_hpc.errors import DataError
from omnirl_hpc.models.qwen_image.family import QwenImage


@pytest.fixture
def check(capsys):
    def run(*arguments: object) -> tuple[int, list[str], str]:
        code = 0
        try:
            main(["prompts", "--check", *map(str, arguments)])
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err.strip()

    return run


@pytest.fixture
def table(tmp_path):
    def write(**columns):
        pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=2)
        return tmp_path / "t.parquet"

    return write


def test_a_usable_table(check, table):
    file = table(prompt=["a", "b", "c"])
    assert check(file) == (0, [f"{file}: 3 prompts, all usable"], "")


def test_every_row_that_cannot_be_used_is_named_by_row_group_and_row(check, table):
    file = table(prompt=["a", " ", "c", None, "e"])
    code, out, err = check(file)
    assert code == 2
    assert out == [
        f"{file}, row group 0, row 1: the prompt is empty",
        f"{file}, row group 1, row 3: the prompt is empty",
    ]
    assert err == f"omnirl-hpc prompts: 2 of 5 rows of {file} cannot be used"


def test_two_rows_with_one_id_would_share_their_random_draws(check, table):
    file = table(prompt=["a", "b", "c"], id=["x", "y", "x"])
    code, out, _ = check(file)
    assert code == 2 and out == [
        f"{file}, row group 1, row 2: the id x is that of {file}, row group 0, row 0, too"
    ]


def test_a_prompt_that_is_too_long_is_found_with_the_model(check, table, tiny_model):
    file = table(prompt=["short", "b" * 2000, "c"])
    assert check(file)[0] == 0  # without a tokenizer nobody can know
    code, out, err = check(file, f"model.path={tiny_model}")
    assert code == 2
    (line,) = out
    assert line.startswith(f"{file}, row group 0, row 1: a prompt of 2")
    assert "is longer than Qwen-Image's 1024: 'bbbb" in line
    assert "1 of 3 rows" in err


def test_what_a_recipe_needs_is_found_as_train_finds_it(check, table, tiny_model, tmp_path):
    """The same rows by `--check` with the run's settings and by `train`, whatever is wrong with them."""
    file = table(prompt=["a", "b" * 1500, "c", "d"], target=["A", "B", None, "D"], id=["1", "2", "3", "1"])
    settings = ("recipe=flowgrpo_tiny", "reward=ocr", f"model.path={tiny_model}", "data.text_lengths=[256]")
    code, out, _ = check(file, *settings)
    assert code == 2 and [line.partition(": ")[0] for line in out] == [
        f"{file}, row group {row // 2}, row {row}" for row in (1, 2, 3)
    ]
    config = load_config([*settings, f"data.prompts={file}", f"run_dir={tmp_path}/run"]).config
    refused = {}
    for name, find in {
        "prompts": check_prompts,
        "lengths": lambda config: check_prompt_lengths(config, QwenImage(config.model)),
    }.items():
        with pytest.raises(DataError) as error:
            find(config)
        refused[name] = str(error.value)
    assert "row 2: it has no target" in refused["prompts"] and "row 3: the id 1" in refused["prompts"]
    assert (
        "row group 0, row 1: its prompt has " in refused["lengths"]
        or "row 1: a prompt of" in refused["lengths"]
    )


def test_the_longest_prompt_is_told_for_the_choice_of_text_lengths(check, table, tiny_model):
    file = table(prompt=["a", "bbb"])
    short, longer = (
        check(table(prompt=prompts), f"model.path={tiny_model}")[1][0] for prompts in (["a"], ["a", "bbb"])
    )
    counts = [int(line.rpartition("the longest has ")[2].split()[0]) for line in (short, longer)]
    assert counts[1] == counts[0] + 2  # the tiny model's tokens are bytes
    assert longer.startswith(f"{file}: 2 prompts, all usable; ")


def test_many_faults_are_counted_and_not_all_shown(check, table):
    code, out, err = check(table(prompt=[" "] * 50))
    assert code == 2 and len(out) == 20 and "50 of 50 rows" in err


def test_a_damaged_row_group_is_named(check, table):
    file = table(prompt=["abc" * 20, "def" * 20, "ghi" * 20])
    data = bytearray(file.read_bytes())
    data[4:24] = b"\xff" * 20
    file.write_bytes(data)
    code, out, err = check(file)
    assert code == 2
    assert all(line.startswith(f"{file}, row group 0") for line in out) and len(out) == 2
    assert "2 of 3 rows" in err


def test_what_is_no_table(check, tmp_path):
    code, out, err = check(tmp_path / "nothing.parquet")
    assert (code, out) == (2, []) and "nothing.parquet cannot be read as parquet" in err


def test_a_file_of_another_form_is_converted(capsys, tmp_path):
    source, out = tmp_path / "p.txt", tmp_path / "folder" / "p.parquet"
    source.write_text('A sign saying "Hi"\na cat\n')
    main(["prompts", str(out), "--from", str(source)])
    assert capsys.readouterr().out == f"wrote 2 prompts to {out}, 1 of them with a target\n"
    assert pq.read_table(out, columns=["prompt", "target"]).to_pylist() == [
        {"prompt": 'A sign saying "Hi"', "target": "Hi"},
        {"prompt": "a cat", "target": None},
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["out.parquet", "--from", "nothing.txt"], "--from nothing.txt does not exist"),
        (["there.parquet", "--from", "p.txt"], "there.parquet exists; delete it or choose another name"),
        (["p.txt/out.parquet", "--from", "p.txt"], "p.txt/out.parquet cannot be written: "),
        (["out.parquet", "--from", "empty.txt"], "empty.txt has no prompts"),
        (
            ["--check", "there.parquet", "model.path=m", "steps=x"],
            "steps=x: the value must be a whole number",
        ),
    ],
)
def test_what_cannot_be_converted(capsys, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("a cat\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "there.parquet").touch()
    with pytest.raises(SystemExit) as end:
        main(["prompts", *arguments])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"omnirl-hpc prompts: {said}")
    assert not (tmp_path / "out.parquet").exists()
