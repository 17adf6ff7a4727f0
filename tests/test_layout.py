"""Ranks -> replicas and mesh."""

from __future__ import annotations

import pytest

from omnirl_hpc.algorithms.flow_grpo import FlowGRPOConfig
from omnirl_hpc.config.schema import ActorConfig, Config, RolloutConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.layout import Layout, make_layout


def layout(rank: int, world_size: int, shard_size: int | None = None, **parallel: int) -> Layout:
    config = Config(
        rollout=RolloutConfig(**parallel),
        actor=ActorConfig(shard_size=shard_size),
        algorithm=FlowGRPOConfig(),
    )
    return make_layout(config, rank, world_size)


def test_by_default_every_rank_is_a_replica_and_all_share_one_copy():
    one = layout(2, 4)
    assert (one.num_replicas, one.replica, one.rank_in_replica, one.mesh_shape) == (4, 2, 0, (1, 4))


def test_replicas_are_consecutive_ranks():
    ranks = [
        layout(rank, 16, tensor_parallel_size=2, ulysses_degree=2, cfg_parallel_size=2) for rank in range(16)
    ]
    assert [r.replica for r in ranks] == [0] * 8 + [1] * 8
    assert [r.rank_in_replica for r in ranks] == [*range(8), *range(8)]
    assert ranks[0].num_replicas == 2


def test_mesh_is_replicate_by_shard():
    assert layout(0, 8, shard_size=2).mesh_shape == (4, 2)
    assert layout(0, 8, shard_size=8).mesh_shape == (1, 8)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_updates_see_the_same_groups_on_any_number_of_ranks(world_size):
    dealt = [list(layout(rank, world_size).groups(16)) for rank in range(world_size)]
    assert sorted(group for groups in dealt for group in groups) == list(range(16))
    for half in (0, 1):  # the k-th part of every rank's groups is the k-th part of the step's
        share = 16 // world_size // 2
        if share:
            part = sorted(group for groups in dealt for group in groups[half * share : (half + 1) * share])
            assert part == list(range(8 * half, 8 * half + 8))


def test_ranks_of_a_replica_have_the_same_groups():
    assert (
        layout(2, 4, tensor_parallel_size=2).groups(6)
        == layout(3, 4, tensor_parallel_size=2).groups(6)
        == range(1, 6, 2)
    )


@pytest.mark.parametrize(
    ("world_size", "settings", "message"),
    [
        (
            4,
            {"tensor_parallel_size": 3},
            "a replica of 3 ranks .*rollout.tensor_parallel_size.* does not divide the 4 rank",
        ),
        (4, {"shard_size": 3}, "actor.shard_size=3 does not divide the 4 rank"),
        (4, {"shard_size": -2}, "actor.shard_size=-2 does not divide"),
        (4, {"cfg_parallel_size": 0}, "rollout.cfg_parallel_size=0 must be 1 or more"),
        (1, {"ulysses_degree": 2}, "a replica of 2 ranks"),
    ],
)
def test_impossible_layouts(world_size, settings, message):
    with pytest.raises(ConfigError, match=message):
        layout(0, world_size, **settings)


def test_description_names_the_numbers():
    text = layout(0, 8, shard_size=4, tensor_parallel_size=2).describe()
    assert text == "8 rank(s): 4 rollout replica(s) of 2, actor mesh 2 (replicate) x 4 (shard)"
