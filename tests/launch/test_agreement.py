"""What fails on one rank is known to all."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from omnirl_hpc.errors import ConfigError, LockLostError, OutputError
from omnirl_hpc.launch.agreement import raise_on_all_ranks
from tests.helpers import run_ranks


def act_together() -> list[object]:
    rank = dist.get_rank()

    def fail() -> int:
        if rank == 1:
            raise OutputError("the disk is full")
        return rank

    def lose_the_lock() -> None:
        if rank == 1:
            raise LockLostError("taken over")

    said: list[object] = [raise_on_all_ranks(lambda: rank, OutputError)]
    try:
        raise_on_all_ranks(fail, OutputError)
    except OutputError as error:
        said.append(str(error))
    try:
        raise_on_all_ranks(lose_the_lock, OutputError)  # any write may find that
    except LockLostError as error:
        said.append(str(error))
    return said


def test_all_ranks_raise_what_one_has_met():
    assert run_ranks(2, act_together) == [
        [rank, "rank 1: the disk is full", "rank 1: taken over"] for rank in range(2)
    ]


def test_another_kind_of_error_passes_as_it_came():
    def fail() -> None:
        raise ConfigError("not an output")

    with pytest.raises(ConfigError, match="^not an output$"):  # and no collective is entered
        raise_on_all_ranks(fail, OutputError)
