"""What to change where a run does not fit."""

from __future__ import annotations

import pytest

from omnirl_hpc.checks.levers import changed, changes_that_divide, changes_that_fit, show
from omnirl_hpc.checks.rules import check
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.layout import make_layout
from omnirl_hpc.planning.estimate import estimate
from omnirl_hpc.planning.gpus import GIB
from tests.planning.cases import full_size


def needs(config, ranks: int) -> float:
    return estimate(config, make_layout(config, 0, ranks), 128).gpu_bytes


@pytest.mark.parametrize(
    ("ranks", "gib", "overrides"),
    [
        (4, 70, ()),  # the rollout is too large
        (4, 80, ("actor.activation_checkpointing=false",)),
        (4, 80, ("residency=resident",)),
        (4, 90, ("rollout.micro_batch_size=4", "actor.micro_batch_size=64", "actor.cfg=batched")),
        (2, 80, ("actor.shard_size=1", "rollout.micro_batch_size=4", "actor.micro_batch_size=64")),
        (1, 60, ("rollout.micro_batch_size=7",)),
    ],
)
def test_with_the_changes_it_fits_and_each_is_needed(ranks, gib, overrides):
    config, _ = full_size(*overrides, ranks=ranks)
    assert needs(config, ranks) > gib * GIB
    change, then = changes_that_fit(config, ranks, 128, gib * GIB)
    assert change and then == needs(changed(config, change), ranks) <= gib * GIB
    check(changed(config, change), ranks, files=False)
    for key in change:
        fewer = {k: v for k, v in change.items() if k != key}
        assert needs(changed(config, fewer), ranks) > gib * GIB, key


def test_the_cheapest_lever_comes_first():
    config, _ = full_size("residency=resident")
    assert changes_that_fit(config, 1, 128, 110 * GIB)[0] == {"residency": "swap"}
    config, _ = full_size(
        "actor.activation_checkpointing=false", "actor.micro_batch_size=4", "rollout.micro_batch_size=4"
    )
    assert changes_that_fit(config, 1, 128, 80 * GIB)[0] == {"actor.activation_checkpointing": True}


def test_a_rollout_that_hides_behind_the_actor_is_made_smaller_too():
    config, _ = full_size("actor.micro_batch_size=64", ranks=2)
    change, _ = changes_that_fit(config, 2, 128, 70 * GIB)
    assert change == {"rollout.micro_batch_size": 8, "actor.micro_batch_size": 32}


def test_where_nothing_helps_the_least_is_named():
    config, _ = full_size()
    change, then = changes_that_fit(config, 1, 128, 30 * GIB)
    assert then == needs(changed(config, change), 1) > 30 * GIB


def test_changing_a_copy_leaves_the_original():
    config, _ = full_size()
    assert changed(config, {"actor.lora.rank": 8}).actor.lora.rank == 8
    assert config.actor.lora.rank == 64


def test_a_layout_that_cannot_be_has_ways_out():
    """32 prompts on 64 GPUs: more prompts, or replicas of four."""
    config, _ = full_size()
    with pytest.raises(ConfigError):
        check(config, 64, files=False)
    ways = changes_that_divide(config, 64)
    assert [show(way) for way in ways] == [
        "data.prompts_per_step=128",
        "rollout.cfg_parallel_size=2 rollout.ulysses_degree=2 actor.micro_batch_size=4",
    ]
    for way in ways:
        check(changed(config, way), 64, files=False)


def test_changes_are_shown_as_overrides():
    change = {
        "actor.shard_size": None,
        "actor.activation_checkpointing": True,
        "data.text_lengths": [64, 128],
    }
    assert (
        show(change) == "actor.shard_size=null actor.activation_checkpointing=true data.text_lengths=[64,128]"
    )
