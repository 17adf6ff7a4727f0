"""The group sampler: every prompt once an epoch, another order each epoch, resumable from its cursor."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnirl_hpc.data.prompts import PromptTable
from omnirl_hpc.data.sampler import GroupSampler


def table_of(tmp_path: Path, size: int, ids: list[str] | None = None) -> PromptTable:
    columns = {"prompt": [f"p{i}" for i in range(size)]} | ({"id": ids} if ids else {})
    pq.write_table(pa.table(columns), tmp_path / f"{size}.parquet")
    return PromptTable(tmp_path / f"{size}.parquet")


def deal(sampler: GroupSampler, steps: int) -> list[str]:
    return [group.prompt.id for _ in range(steps) for group in sampler.next_groups()]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, 12), per_step=st.integers(1, 15), seed=st.integers(0, 1000))
def test_every_prompt_once_an_epoch(tmp_path, size, per_step, seed):
    dealt = deal(GroupSampler(table_of(tmp_path, size), per_step, 2, seed), steps=3 * size)
    everyone = sorted(str(i) for i in range(size))
    epochs = [dealt[i : i + size] for i in range(0, len(dealt), size)]  # 3 per_step whole epochs
    assert len(epochs) == 3 * per_step
    assert all(sorted(epoch) == everyone for epoch in epochs)


def test_epochs_and_seeds_have_orders_of_their_own(tmp_path):
    table = table_of(tmp_path, 30)
    dealt = deal(GroupSampler(table, 10, 2, seed=0), steps=9)
    first, second, third = dealt[:30], dealt[30:60], dealt[60:]
    assert first != second != third != first
    assert first != [str(i) for i in range(30)]
    assert deal(GroupSampler(table, 10, 2, seed=1), steps=3) != first
    assert deal(GroupSampler(table, 6, 2, seed=0), steps=5) == first  # the step's size only cuts the sequence


def test_resuming_from_a_cursor_equals_going_straight(tmp_path):
    table = table_of(tmp_path, 7)
    straight = GroupSampler(table, 3, 4, seed=5)
    steps = [straight.next_groups() for _ in range(8)]
    for stop in range(8):
        resumed = GroupSampler(table, 3, 4, seed=5)
        resumed.cursor = 3 * stop
        assert [resumed.next_groups() for _ in range(8 - stop)] == steps[stop:]


def test_groups_of_a_step_are_numbered(tmp_path):
    groups = GroupSampler(table_of(tmp_path, 9), 4, 2, seed=0).next_groups()
    assert [group.index for group in groups] == [0, 1, 2, 3]
    assert [group.first_sample for group in groups] == [0, 0, 0, 0]


@pytest.mark.parametrize("ids", [None, ["same"] * 3])
def test_a_prompt_twice_in_a_step_gets_samples_of_its_own(tmp_path, ids):
    groups = GroupSampler(table_of(tmp_path, 3, ids), 8, samples_per_prompt=5, seed=0).next_groups()
    samples = [(group.prompt.id, group.first_sample + k) for group in groups for k in range(5)]
    assert len(set(samples)) == len(samples) == 40
