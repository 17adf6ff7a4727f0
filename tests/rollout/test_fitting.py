"""The engine's micro-batch is fitted to memory before the first step, by all ranks together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from omnirl_hpc.errors import EngineError
from omnirl_hpc.rollout.engine import SampleRequest
from omnirl_hpc.rollout.fitting import fit_micro_batch_size
from omnirl_hpc.sampling.samples import SampleIdentity
from omnirl_hpc.sampling.windows import Window
from tests.helpers import CPU, one_rank_group, run_ranks

REQUESTS = [
    SampleRequest(SampleIdentity(0, 0, "a", sample), 0, Window(0, 1), {}, None, 8) for sample in range(3)
]


class Engine:
    """Runs out of memory above `room` samples, while it generates."""

    def __init__(self, micro_batch_size: int, room: int) -> None:
        self.micro_batch_size = micro_batch_size
        self.room = room
        self.tried = []

    def generate(self, requests):
        self.tried.append(len(requests))
        assert {r.width for r in requests} == {64}  # the largest width of the run, not the step's
        yield None
        if len(requests) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")


def fit(engine: Engine, may_shrink: bool = True) -> int:
    with one_rank_group():
        return fit_micro_batch_size(engine, REQUESTS, 64, CPU, may_shrink)


def test_what_fits_stays():
    engine = Engine(16, room=16)
    assert fit(engine) == engine.micro_batch_size == 16
    assert engine.tried == [16]


def test_it_is_halved_until_it_fits_and_says_so(caplog):
    engine = Engine(16, room=5)
    assert fit(engine) == engine.micro_batch_size == 4
    assert engine.tried == [16, 8, 4]
    assert (
        "rollout.micro_batch_size=16 does not fit into the GPU's memory: all ranks go on with 8"
        in caplog.text
    )


def test_one_sample_that_does_not_fit_is_an_error():
    with pytest.raises(EngineError, match="not even one sample"):
        fit(Engine(2, room=0))


def test_strict_determinism_refuses_to_change_it():
    engine = Engine(16, room=8)
    with pytest.raises(EngineError, match="determinism=strict does not change it: set 8"):
        fit(engine, may_shrink=False)
    assert engine.micro_batch_size == 16


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    engine = Engine(2, room=2)
    engine.generate = lambda requests: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(engine)


def of_a_rank() -> list[int]:
    engine = Engine(16, room=[16, 5][dist.get_rank()])
    fit_micro_batch_size(engine, REQUESTS, 64, CPU, may_shrink=True)
    return [*engine.tried, engine.micro_batch_size]


def test_what_fits_on_one_rank_alone_is_too_much():
    """All micro-batches of a run have one shape, on every rank."""
    assert run_ranks(2, of_a_rank) == [[16, 8, 4, 4]] * 2
