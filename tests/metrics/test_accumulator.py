"""Metrics of a step, on a group of one rank."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from omnirl_hpc.metrics.accumulator import Accumulator
from tests.helpers import run_ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sums_means_maxima_and_values():
    metrics = Accumulator(CPU)
    metrics.add_sum("loss", torch.tensor(0.5))
    metrics.add_sum("loss", 0.25)
    metrics.add_mean("ratio", torch.tensor([1.0, 3.0]), torch.tensor([0.5, 0.25]))
    metrics.add_mean("ratio", torch.tensor([5.0]), torch.tensor([0.25]))
    metrics.add_max("gap", torch.tensor(-3.0))
    metrics.add_max("gap", -7.0)
    metrics.set("lr", 1.0)
    metrics.set("lr", 2.0)
    # loss: 0.5 + 0.25; ratio: (1 x 0.5 + 3 x 0.25 + 5 x 0.25) / 1; gap: larger of -3, -7; lr: last
    assert metrics.reduce() == {"loss": 0.75, "ratio": 2.5, "gap": -3.0, "lr": 2.0}


def test_weights_need_not_sum_to_one():
    metrics = Accumulator(CPU)
    metrics.add_mean("ratio", torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0]))
    assert metrics.reduce() == {"ratio": 2.0}  # (2 + 4) / 3


def test_a_sample_of_weight_zero_does_not_count_even_if_it_is_nan():
    metrics = Accumulator(CPU)
    metrics.add_mean("ratio", torch.tensor([1.0, math.nan]), torch.tensor([1.0, 0.0]))
    metrics.add_mean("none", torch.tensor([math.nan]), torch.tensor([0.0]))
    assert metrics.reduce() == {"ratio": 1.0, "none": 0.0}


def test_a_nan_that_counts_is_reported():
    metrics = Accumulator(CPU)
    metrics.add_mean("ratio", torch.tensor([1.0, math.nan]), torch.tensor([1.0, 1.0]))
    metrics.add_max("gap", math.nan)
    metrics.add_max("gap", 1.0)
    assert all(math.isnan(value) for value in metrics.reduce().values())


def test_sums_in_double_precision():
    metrics = Accumulator(CPU)
    metrics.add_sum("loss", 2.0**30)
    for _ in range(4):
        metrics.add_sum("loss", torch.tensor(2.0**-10))  # lost one by one in fp32
    assert metrics.reduce()["loss"] == 2.0**30 + 2.0**-8


def test_nothing_added_nothing_reported():
    assert Accumulator(CPU).reduce() == {}


def of_a_rank() -> tuple[dict[str, float], float]:
    """Rank 0 has samples of weights 0.5 and 0.125, rank 1 one of weight 0.25."""
    rank, metrics = dist.get_rank(), Accumulator(CPU)
    metrics.add_sum("loss", [0.5, 0.25][rank])
    values, weights = [([1.0, 3.0], [0.5, 0.125]), ([5.0], [0.25])][rank]
    metrics.add_mean("ratio", torch.tensor(values), torch.tensor(weights))
    metrics.add_max("gap", [-3.0, -1.0][rank])
    metrics.set("lr", 0.1)
    return metrics.reduce(), metrics.largest("gap")


def test_metrics_are_those_of_all_ranks():
    # loss: 0.5 + 0.25; ratio: (1 x 0.5 + 3 x 0.125 + 5 x 0.25) / 0.875; gap: the larger of -3 and -1
    expected = {"loss": 0.75, "ratio": 2.125 / 0.875, "gap": -1.0, "lr": 0.1}
    assert run_ranks(2, of_a_rank) == [(expected, -1.0)] * 2
