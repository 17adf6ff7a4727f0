"""Prompt tables that lack what a reward or an evaluation needs."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnirl_hpc.algorithms.flow_grpo import FlowGRPOConfig
from omnirl_hpc.checks.data import check_prompt_lengths, check_prompts
from omnirl_hpc.config.schema import Config, DataConfig, RewardConfig, RewardPartConfig
from omnirl_hpc.errors import DataError
from tests.tables import (
    raw_text,
    write_with_a_nanosecond,
    write_with_latin_metadata,
    write_with_latin_prompt,
    write_with_two_columns_of_a_name,
)

NEEDING = RewardPartConfig("tests.rewards.scripted:NeedsTargets")
INDIFFERENT = RewardPartConfig("tests.rewards.scripted:Scripted")


@pytest.fixture
def check(tmp_path):
    def run(*parts: RewardPartConfig, **columns) -> None:
        file = tmp_path / "t.parquet"
        pq.write_table(pa.table(columns), file, row_group_size=2)
        rewards = RewardConfig({str(i): part for i, part in enumerate(parts)})
        check_prompts(Config(data=DataConfig(prompts=str(file)), algorithm=FlowGRPOConfig(), reward=rewards))

    return run


def test_a_complete_table(check):
    check(INDIFFERENT, NEEDING, prompt=["a", "b", "c"], target=["A", "B", "C"])


def test_rows_without_a_target_are_named(check):
    with pytest.raises(
        DataError,
        match=r"^3 of 5 rows of \S+t.parquet cannot be used: row group 0, row 1: it has no target, with "
        r"which reward 1 compares; row group 1, row 3: it .*; row group 2, row 4: it .* compares\. Mend them",
    ):
        check(INDIFFERENT, NEEDING, prompt=["a", "b", "c", "d", "e"], target=["A", None, "C", "", "  "])


def test_a_table_without_the_column_names_the_first_rows(check):
    with pytest.raises(
        DataError, match=r"^20 of 20 rows .*row group 2, row 4: it has no target, .* compares; …\. Mend"
    ):
        check(NEEDING, prompt=["a"] * 20)


def test_rows_without_a_prompt_are_named(check):
    with pytest.raises(
        DataError,
        match=r"^2 of 5 rows of \S+t.parquet cannot be used: row group 1, row 2: the prompt is empty; row "
        r"group 2, row 4: the prompt is empty\. Mend",
    ):
        check(INDIFFERENT, prompt=["a", "b", None, "d", " "])


def test_who_needs_no_targets_may_lack_them(check):
    check(INDIFFERENT, prompt=["a", "b"])


def test_the_table_of_evaluation_is_asked_too(tmp_path):
    tables = {name: str(tmp_path / f"{name}.parquet") for name in ("train", "held_out")}
    pq.write_table(pa.table({"prompt": ["a"], "target": ["A"]}), tables["train"])
    pq.write_table(pa.table({"prompt": ["a"]}), tables["held_out"])
    config = Config(
        data=DataConfig(prompts=tables["train"]),
        algorithm=FlowGRPOConfig(),
        reward=RewardConfig({"ocr": NEEDING}),
    )
    check_prompts(config)
    config.evaluation.prompts = tables["held_out"]
    with pytest.raises(DataError, match=r"1 of 1 rows of \S+held_out.parquet cannot be used"):
        check_prompts(config)


class Counter:
    """A tokenizer of one token for some bytes, within a template of 3 tokens, for a model that takes `limit`
    and wants a token of padding.
    """

    def __init__(self, bytes_a_token: int = 1, limit: int = 10_000) -> None:
        self.bytes_a_token, self.limit = bytes_a_token, limit

    def count_text_tokens(self, text: str) -> int:
        tokens = 3 + len(text.encode()) // self.bytes_a_token
        if tokens > self.limit:
            raise DataError("too long for the model")
        return tokens

    def longest_text(self, widths: list[int]) -> int:
        return widths[-1] - 1


def test_two_rows_of_one_id_would_share_their_random_draws(check):
    with pytest.raises(
        DataError, match=r"row group 1, row 2: the id x is that of \S+, row group 0, row 0, too"
    ):
        check(INDIFFERENT, prompt=["a", "b", "c"], id=["x", "y", "x"])


def test_the_columns_that_a_reward_reads(check):
    reading = RewardPartConfig("tests.rewards.scripted:ReadsStyles")
    check(reading, prompt=["a"], style=["ink"])
    with pytest.raises(DataError, match="has no column 'style', which a reward reads"):
        check(reading, prompt=["a"])
    with pytest.raises(DataError, match=r"row group 1, row 2: style is not UTF-8 \(byte 0xe9\)"):
        check(reading, prompt=["a", "b", "c"], style=raw_text([b"ink", b"oil", b"gouach\xe9"]))
    check(INDIFFERENT, prompt=["a", "b", "c"], style=raw_text([b"ink", b"oil", b"gouach\xe9"]))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (write_with_a_nanosecond, None),
        (write_with_latin_metadata, None),
        (write_with_latin_prompt, "1 of 12 rows .* cannot be used: row group 1, row 11: prompt is not UTF-8"),
        (write_with_two_columns_of_a_name, "has several columns 'prompt'"),
    ],
)
def test_tables_of_other_programs(tmp_path, make, said):
    data = DataConfig(prompts=str(make(tmp_path / "t.parquet")))
    config = Config(data=data, algorithm=FlowGRPOConfig(), reward=RewardConfig({"a": INDIFFERENT}))
    if said is None:
        check_prompts(config)
    else:
        with pytest.raises(DataError, match=said):
            check_prompts(config)


class TestLengths:
    """Padded widths of 8 and 16: with a token of padding and the template, 12 bytes fit."""

    @pytest.fixture
    def config(self, tmp_path):
        file, columns = (
            tmp_path / "t.parquet",
            {"prompt": ["x" * 12, "é" * 7, "x" * 99, "x" * 12], "negative_prompt": [None] * 4},
        )
        pq.write_table(pa.table(columns), file, row_group_size=2)
        return Config(data=DataConfig(prompts=str(file), text_lengths=[8, 16]), algorithm=FlowGRPOConfig())

    def test_rows_that_are_too_long_are_named(self, config):
        with pytest.raises(
            DataError,
            match=r"^2 of 4 rows of \S+t.parquet cannot be used: row group 0, row 1: its prompt has "
            r"17 tokens, of which data.text_lengths=\[8, 16\] allow 15; row group 1, row 2: too long for",
        ):
            check_prompt_lengths(config, Counter(limit=40))

    def test_a_wider_text_length_or_fewer_tokens_cure_it(self, config):
        check_prompt_lengths(config, Counter(bytes_a_token=10))
        config.data.text_lengths = [128]
        check_prompt_lengths(config, Counter())

    def test_negative_prompts_count_where_there_is_guidance(self, config, tmp_path):
        pq.write_table(
            pa.table({"prompt": ["x", "y"], "negative_prompt": ["z", "z" * 13]}), tmp_path / "t.parquet"
        )
        with pytest.raises(
            DataError, match=r"1 of 2 rows .*: row group 0, row 1: its negative prompt has 16 tokens"
        ):
            check_prompt_lengths(config, Counter(limit=40))
        config.sampling.true_cfg_scale = 1.0
        check_prompt_lengths(config, Counter(limit=40))

    def test_the_negative_prompt_of_all_rows(self, config):
        config.data.text_lengths, config.data.negative_prompt = [128], "z" * 200
        with pytest.raises(DataError, match="^data.negative_prompt cannot be used: its .* has 203 tokens"):
            check_prompt_lengths(config, Counter())
