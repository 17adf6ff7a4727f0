"""Ranks that meet on a store: here each is a thread, with a real TCP store between them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from omnirl_hpc.errors import ConfigError, LaunchError
from omnirl_hpc.launch import rendezvous as module
from omnirl_hpc.launch.identity import Identity
from omnirl_hpc.launch.rendezvous import Rendezvous, numbers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


JOB = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


def arrive(
    rank: int, size: int, port: int, seconds: float, purpose="run_dir=a", **environ: str
) -> Rendezvous:
    return Rendezvous(Identity("srun", rank, rank, size, "localhost", port), seconds, purpose, JOB | environ)


def meet(
    size: int, ranks: list[int], function: Callable[[Rendezvous], Any], seconds: float = 30.0
) -> list[Any]:
    """What `function` returns or raises on each of the given ranks, of `size` in all."""
    port = free_port()

    def one(rank: int) -> Any:
        try:
            return function(arrive(rank, size, port, seconds))
        except LaunchError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_gather_and_share():
    def talk(at: Rendezvous) -> tuple[list[str], str]:
        rank = at.identity.rank
        said = at.gather("letters", "abc"[rank]), at.share("word", "yes" if rank == 0 else "ignored")
        at.gather("heard", "")  # the store ends with rank 0
        return said

    assert meet(3, [0, 1, 2], talk) == [(["a", "b", "c"], "yes"), ([], "yes"), ([], "yes")]


def test_alone_opens_no_port():
    at = Rendezvous(Identity("alone", 0, 0, 1), 1.0, "a test", {})
    assert at.gather("x", "1") == ["1"] and at.share("y", "2") == "2"


def test_ranks_that_never_come_are_named(monkeypatch):
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.5)
    zero, two = meet(4, [0, 2], lambda at: None, seconds=1.0)
    assert f"rank(s) 1, 3 of 4 did not arrive within 1 s; the others are on {socket.gethostname()}" in str(
        zero
    )
    assert (
        str(two).startswith("rank 2 of 4 on ")
        and "rank 0" in str(two)
        and "its own message says why" in str(two)
    )


def test_a_rank_that_stops_in_between_is_named(monkeypatch):
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.5)
    zero, one = meet(2, [0, 1], lambda at: at.identity.rank or at.gather("later", ""), seconds=1.0)
    assert "rank(s) 1 of 2 did not arrive within 1 s" in str(zero) and one == 1


def test_no_rank_0():
    (error,) = meet(2, [1], lambda at: None, seconds=1.0)
    assert str(error).startswith("rank 1 of 2 on ") and "rank 0 does not answer at localhost:" in str(error)


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"port {port}, which another program seems to have: set another MASTER_PORT"
        ):
            arrive(0, 2, port, 1.0)


STRANGERS = [
    ({"SLURM_JOB_ID": "8"}, 2, "run_dir=a", "slurm job 8, start 1, step 0, 2 ranks, run_dir=a"),
    ({"SLURM_RESTART_COUNT": "1"}, 2, "run_dir=a", "slurm job 7, start 2, step 0, 2 ranks, run_dir=a"),
    ({"SLURM_STEP_ID": "1"}, 2, "run_dir=a", "slurm job 7, start 1, step 1, 2 ranks, run_dir=a"),
    ({}, 3, "run_dir=a", "slurm job 7, start 1, step 0, 3 ranks, run_dir=a"),
    ({}, 2, "run_dir=b", "slurm job 7, start 1, step 0, 2 ranks, run_dir=b"),
]


@pytest.mark.parametrize(("environ", "size", "purpose", "name"), STRANGERS)
def test_a_rank_of_another_job_is_turned_away_and_the_owner_lives(environ, size, purpose, name):
    """The stranger is there before the owner's own rank 1, whose place it would have taken."""
    port = free_port()
    owner = "slurm job 7, start 1, step 0, 2 ranks, run_dir=a"
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(lambda: arrive(0, 2, port, 30.0).gather("word", "of rank 0"))
        with pytest.raises(ConfigError) as error:
            arrive(1, size, port, 30.0, purpose, **environ)
        assert str(error.value) == (
            f"the ranks at localhost:{port} are those of another job: {owner}; this is {name}: set another "
            "MASTER_PORT"
        )
        arrive(1, 2, port, 30.0).gather("word", "of rank 1")
        assert zero.result(timeout=60) == ["of rank 0", "of rank 1"]


def test_a_second_process_with_the_same_rank_is_turned_away():
    """As where each task of a step starts an MPI or torchrun world of its own."""
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(lambda: arrive(0, 2, port, 30.0).gather("word", ""))
        one = pool.submit(lambda: arrive(1, 2, port, 30.0))
        one.result(timeout=60)
        with pytest.raises(
            ConfigError, match=f"there are two ranks 1 of 2: the other is process {os.getpid()} on "
        ):
            arrive(1, 2, port, 30.0)
        one.result().gather("word", "")
        assert zero.result(timeout=60) == ["", ""]


def test_ranks_that_torchrun_starts_again_meet_in_the_store_that_it_kept(monkeypatch):
    kept = dist.HashStore()
    monkeypatch.setattr(Rendezvous, "_connect", lambda self, address, port, environ: kept)
    for attempt in ("0", "1"):
        environ = {"TORCHELASTIC_RESTART_COUNT": attempt, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        with ThreadPoolExecutor(2) as pool:
            ranks = [pool.submit(arrive, rank, 2, 1, 30.0, **environ) for rank in (1, 0)]
            assert [rank.result(timeout=60).identity.rank for rank in ranks] == [1, 0]


def test_numbers():
    assert numbers([3, 0, 1, 2, 7, 9, 10]) == "0-3, 7, 9-10"
