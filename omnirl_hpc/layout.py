"""Ranks -> rollout replicas and actor mesh, both on the same GPUs.

A replica is `replica_size` consecutive ranks that generate together. The actor mesh is (replicate x shard)
over all ranks: `shard_size` consecutive ranks share one copy of the weights, and gradients are summed over
all. Nothing here talks to another process.
"""

from __future__ import annotations

from dataclasses import dataclass

from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """Where one rank stands."""

    rank: int
    world_size: int
    replica_size: int
    shard_size: int

    @property
    def num_replicas(self) -> int:
        return self.world_size // self.replica_size

    @property
    def replica(self) -> int:
        """The replica this rank generates in."""
        return self.rank // self.replica_size

    @property
    def rank_in_replica(self) -> int:
        return self.rank % self.replica_size

    @property
    def mesh_shape(self) -> tuple[int, int]:
        """(replicate, shard) of the actor mesh."""
        return self.world_size // self.shard_size, self.shard_size

    def groups(self, num_groups: int) -> range:
        """The groups of a step that this rank's replica generates.

        Dealt round-robin, so that the k-th part of every replica's groups is together the k-th part of the
        step, however many replicas there are: optimizer updates see the same samples on 1 rank and on 64.
        """
        return range(self.replica, num_groups, self.num_replicas)

    def describe(self) -> str:
        replicate, shard = self.mesh_shape
        return (
            f"{self.world_size} rank(s): {self.num_replicas} rollout replica(s) of {self.replica_size}, "
            f"actor mesh {replicate} (replicate) x {shard} (shard)"
        )


def make_layout(config: Config, rank: int, world_size: int) -> Layout:
    """The layout of `config` on `world_size` ranks. Raises ConfigError for one that cannot be."""
    parallel = {
        "rollout.tensor_parallel_size": config.rollout.tensor_parallel_size,
        "rollout.ulysses_degree": config.rollout.ulysses_degree,
        "rollout.cfg_parallel_size": config.rollout.cfg_parallel_size,
    }
    replica_size = 1
    for key, value in parallel.items():
        if value < 1:
            raise ConfigError(f"{key}={value} must be 1 or more")
        replica_size *= value
    if world_size % replica_size:
        raise ConfigError(
            f"a replica of {replica_size} ranks ({' x '.join(parallel)}) does not divide the {world_size} "
            "rank(s) of this job"
        )
    shard_size = config.actor.shard_size or world_size
    if shard_size < 1 or world_size % shard_size:
        raise ConfigError(
            f"actor.shard_size={shard_size} does not divide the {world_size} rank(s) of this job"
        )
    return Layout(rank, world_size, replica_size, shard_size)
