"""The default process group and this rank's device."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from omnirl_hpc.errors import LaunchError
from omnirl_hpc.launch.groups import pick_device, process_group
from omnirl_hpc.launch.identity import Identity
from omnirl_hpc.launch.rendezvous import Rendezvous

CPU = torch.device("cpu")
ALONE = Identity("alone", 0, 0, 1)


def test_device_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(Identity("torchrun", 5, 1, 8)) == CPU


@pytest.mark.parametrize("seen, expected", [(4, "cuda:3"), (1, "cuda:0")])
def test_device_is_the_local_ranks_or_the_only_one(monkeypatch, seen, expected):
    """Slurm may show each rank its own GPU alone; what CUDA_VISIBLE_DEVICES says is no help then."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert pick_device(Identity("srun", 7, 3, 8)) == torch.device(expected)


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(
        LaunchError, match=r"^rank 5 of 8 on \S+ \(srun\) is number 5 on its node, which has 4 GPUs"
    ):
        pick_device(Identity("srun", 5, 5, 8))


def test_a_group_of_one_needs_no_address():
    for _ in range(2):  # and can be formed again
        with process_group(Rendezvous(ALONE, 10, "a test"), CPU):
            assert dist.get_backend() == "gloo"
            assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
            total = torch.tensor([2.0])
            dist.all_reduce(total)
            assert total.item() == 2.0
        assert not dist.is_initialized()


def test_after_an_error_the_group_is_left_to_the_end_of_the_process():
    """Leaving it would wait for ranks that may be stuck."""
    with pytest.raises(KeyError):
        with process_group(Rendezvous(ALONE, 10, "a test"), CPU):
            raise KeyError
    assert dist.is_initialized()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def reduce_ranks(rank: int, port: int, results) -> None:
    identity = Identity("srun", rank, rank, 2, "localhost", port)
    with process_group(Rendezvous(identity, 60, "a test"), CPU):
        total = torch.tensor([10.0 + rank])
        dist.all_reduce(total)
        results.put((rank, dist.get_world_size(), total.item()))


def test_two_ranks_meet_at_rank_zero():
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(reduce_ranks, (free_port(), results), nprocs=2)
    assert sorted(results.get() for _ in range(2)) == [(0, 2, 21.0), (1, 2, 21.0)]
