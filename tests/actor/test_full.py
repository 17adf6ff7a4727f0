"""The actor with all weights trained: gradients of plain autograd, fp32 masters, and what is gathered of
them.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from omnirl_hpc.actor.fsdp import FSDPActor
from omnirl_hpc.actor.update import accumulate_gradients
from omnirl_hpc.algorithms import FlowGRPO
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.layout import make_layout
from omnirl_hpc.metrics.accumulator import Accumulator
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.policies import CURRENT, REFERENCE
from omnirl_hpc.sampling.streams import LATENTS
from tests.actor.cases import SAMPLES, gradients, largest_difference, make_actor, make_points, plain_gradients
from tests.helpers import CPU, go_on, make_config, one_rank_group, run_ranks

ALL = range(SAMPLES)
FULL = ("actor.train=full", "actor.optimizer.lr=1e-3")


@pytest.fixture
def configured(tiny_model, tiny_prompts, tmp_path):
    return lambda *overrides: make_config(tiny_model, tiny_prompts, tmp_path, *FULL, *overrides)


@pytest.fixture
def group():
    with one_rank_group():
        yield


def copies(actor: FSDPActor) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in actor.weights()}


def update(actor: FSDPActor, config: Config, rows=ALL) -> None:
    accumulate_gradients(
        actor, FlowGRPO(config), make_points(config, rows, 2), Accumulator(CPU), go_on, first=True
    )
    actor.apply_gradients()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_plain_autograds(group, configured, checkpointing):
    config = configured(f"actor.activation_checkpointing={checkpointing}")
    made = gradients(make_actor(config), config, make_points(config, ALL, micro_batch=4))
    expected = plain_gradients(config, make_points(config, ALL, micro_batch=4))
    assert {"img_in.weight", "proj_out.bias", "transformer_blocks.0.attn.norm_q.weight"} < made.keys()
    assert largest_difference(made, expected) < 1e-6


def test_what_is_trained_is_the_whole_transformer(group, configured):
    config = configured("actor.dtype=bfloat16", "rollout.dtype=bfloat16")
    actor, plain = make_actor(config), QwenImage(config.model).load_transformer(torch.float32)
    assert all(parameter.dtype == torch.float32 for parameter in actor._parameters.values())
    trained = dict(actor.weights(dtype=torch.bfloat16))
    assert list(trained) == [name for name, _ in plain.named_parameters()]
    for name, parameter in plain.named_parameters():
        assert torch.equal(trained[name], parameter.to(torch.bfloat16))
    assert actor.sharded_state().keys() > trained.keys()


def test_a_rolled_back_update_was_never_made(group, configured):
    config = configured("actor.optimizer.warmup_updates=4")
    actor = make_actor(config)
    before = copies(actor)
    update(actor, config)
    kept, optimizer = copies(actor), {name: tensor.clone() for name, tensor in actor.full_optimizer_state()}
    assert sum(not torch.equal(kept[name], before[name]) for name in before) > 60
    actor.sleep()
    actor.wake()
    actor.keep()
    update(actor, config)
    assert not all(torch.equal(tensor, kept[name]) for name, tensor in actor.weights())
    actor.rollback()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in actor.weights())
    assert all(torch.equal(tensor, optimizer[name]) for name, tensor in actor.full_optimizer_state())


def test_what_an_offload_has_overwritten_cannot_be_rolled_back(group, configured):
    """To offload what has not changed, as for a checkpoint between two steps, overwrites nothing."""
    config = configured()
    actor = make_actor(config)
    actor.keep()
    kept = copies(actor)
    actor.sleep()
    actor.wake()
    update(actor, config)
    actor.rollback()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in actor.weights())
    update(actor, config)
    actor.sleep()
    actor.wake()
    with pytest.raises(RuntimeError, match="what was kept is gone"):
        actor.rollback()


def test_there_is_no_reference(group, configured):
    config = configured()
    with pytest.raises(ConfigError, match="needs the reference.*set actor.train=lora"):
        make_actor(config).velocity(make_points(config, ALL, 4)[0], REFERENCE)


def on_two_ranks(configs: dict[str, Config]) -> dict[str, dict]:
    """What rank r makes of its half of the samples."""
    results, rank = {}, dist.get_rank()
    for name, config in configs.items():
        actor = make_actor(config, make_layout(config, rank, dist.get_world_size()))
        before = copies(actor)
        made = gradients(actor, config, make_points(config, [rank, rank + 2], micro_batch=2))
        update(actor, config, [rank, rank + 2])
        with torch.no_grad():
            dtype = actor.velocity(make_points(config, [rank], 1)[0], CURRENT)[LATENTS].dtype
        results[name] = {"before": before, "gradients": made, "after": copies(actor), "dtype": dtype}
    return results


def test_two_ranks_train_what_one_would(configured):
    """Sharded, replicated, and computed in bf16 on fp32 masters."""
    configs = {
        "shard": configured(),
        "replicate": configured("actor.shard_size=1"),
        "bf16": configured("actor.dtype=bfloat16", "rollout.dtype=bfloat16"),
    }
    ranks = run_ranks(2, on_two_ranks, configs)
    expected = plain_gradients(configs["shard"], make_points(configs["shard"], ALL, micro_batch=4))
    loaded = QwenImage(configs["shard"].model).load_transformer(torch.float32).state_dict()
    for rank in ranks:
        for name in configs:
            before = rank[name]["before"]
            assert before.keys() == loaded.keys() and all(
                torch.equal(before[key], loaded[key]) for key in loaded
            )
        for name in ("shard", "replicate"):
            assert largest_difference(rank[name]["gradients"], expected) < 1e-6
        for name in configs:
            assert all(
                torch.equal(tensor, ranks[0][name]["after"][key])
                for key, tensor in rank[name]["after"].items()
            )
        bf16 = rank["bf16"]
        assert bf16["dtype"] == torch.bfloat16
        assert {tensor.dtype for tensor in bf16["gradients"].values()} == {torch.float32}
        # the masters took a step finer than bf16
        weight = bf16["after"]["transformer_blocks.0.attn.to_q.weight"]
        assert not torch.equal(weight, weight.bfloat16().float())
