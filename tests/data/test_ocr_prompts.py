"""Prompts that ask for a text in the image."""

from __future__ import annotations

import pyarrow.parquet as pq

from omnirl_hpc.data.ocr_prompts import SCENES, ocr_prompts, write_ocr_table
from omnirl_hpc.data.prompts import PromptTable


def test_the_target_stands_in_quotes_in_the_prompt():
    rows = list(ocr_prompts(200, seed=0))
    assert all(f'"{row["target"]}"' in row["prompt"] for row in rows)
    assert all(1 <= len(row["target"].split()) <= 3 for row in rows)
    assert len({row["id"] for row in rows}) == 200
    scenes = {row["prompt"].replace(row["target"], "{text}") for row in rows}
    assert scenes == set(SCENES)  # 200 draws of 14 scenes: all of them with probability 1 - 5e-6


def test_a_function_of_the_seed_only():
    assert (
        list(ocr_prompts(20, seed=1)) == list(ocr_prompts(20, seed=1)) == list(ocr_prompts(40, seed=1))[:20]
    )
    assert [row["prompt"] for row in ocr_prompts(20, seed=1)] != [
        row["prompt"] for row in ocr_prompts(20, seed=2)
    ]


def test_the_table_is_written_in_small_row_groups_and_read_back(tmp_path):
    file = tmp_path / "ocr.parquet"
    write_ocr_table(str(file), count=10, seed=3, rows_per_group=4)
    assert pq.ParquetFile(file).num_row_groups == 3
    table = PromptTable(file)
    read = [
        {"id": p.id, "prompt": p.prompt, "target": p.target} for p in (table[i] for i in range(len(table)))
    ]
    assert read == list(ocr_prompts(10, seed=3))
