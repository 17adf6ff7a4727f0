"""Policies that an actor stores beside the one it trains."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from omnirl_hpc.actor.fsdp import FSDPActor
from omnirl_hpc.actor.trained import TrainedAdapter
from omnirl_hpc.layout import make_layout
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.policies import CURRENT, OLD, REFERENCE, Blend, label, policy_of
from omnirl_hpc.sampling.streams import LATENTS
from tests.actor.cases import SAMPLES, largest_difference, make_points
from tests.helpers import CPU, fill_adapter, make_config, one_rank_group, run_ranks

ALL = range(SAMPLES)
# Checkpointing recomputes the current policy's forward pass in the backward pass, after the old one's.
SETTINGS = {
    "adapter": ("actor.activation_checkpointing=true",),
    # a target outside of the blocks: the root keeps its gathered weights after a forward pass
    "root": ("actor.lora.target_modules=[to_q,proj_out]",),
    "bf16 adapter": ("actor.lora.dtype=bfloat16",),
    "weights": ("actor.train=full", "actor.activation_checkpointing=true"),
}


@pytest.fixture
def configured(tiny_model, tiny_prompts, tmp_path):
    return lambda *overrides: make_config(tiny_model, tiny_prompts, tmp_path, *overrides)


def make_actor(config, seed: int = 1) -> FSDPActor:
    """Its old policy is what it was made with, and the current one another."""
    layout = make_layout(config, dist.get_rank(), dist.get_world_size())
    actor = FSDPActor(config, QwenImage(config.model), layout, CPU, (CURRENT, OLD))
    move(actor, seed)
    return actor


def move(actor: FSDPActor, seed: int) -> None:
    if actor.adapter_config is not None:
        fill_adapter(actor.transformer, seed)
    else:
        moved = {
            name: tensor * (1 + 0.01 * seed) if tensor.dim() > 1 else tensor.clone()
            for name, tensor in actor.weights()
        }
        actor.load(CURRENT, moved)


def copies(actor, policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.weights(policy)}


def check_that_each_policy_predicts_as_itself(config) -> None:
    """As an actor whose current policy it is; and a gradient does not notice that others predicted between
    the two passes.
    """
    actor, point = make_actor(config), make_points(config, ALL, micro_batch=4)[0]
    current = copies(actor, CURRENT)
    velocity = actor.velocity(point, CURRENT)[LATENTS]
    with torch.no_grad():
        old = actor.velocity(point, OLD)[LATENTS].clone()
    (velocity * (velocity - old)).sum().backward()
    made = {name: gradient.clone() for name, gradient in actor.gradients()}
    assert all(torch.equal(tensor, current[name]) for name, tensor in actor.weights())

    other = make_actor(config)
    velocity = other.velocity(point, CURRENT)[LATENTS]
    (velocity * (velocity - old)).sum().backward()
    expected = {name: gradient.clone() for name, gradient in other.gradients()}
    assert largest_difference(made, expected) == 0
    other.load(CURRENT, {n: t.to(current[n].dtype) for n, t in copies(actor, OLD).items()})
    with torch.no_grad():
        assert torch.equal(other.velocity(point, CURRENT)[LATENTS], old)
        assert not torch.equal(velocity, old)


def on_two_ranks(configs) -> None:
    for config in configs:
        check_that_each_policy_predicts_as_itself(config)


def test_each_policy_predicts_as_itself(configured):
    configs = [configured(*overrides) for overrides in SETTINGS.values()]
    run_ranks(2, on_two_ranks, configs)
    with one_rank_group():
        for config in configs:
            check_that_each_policy_predicts_as_itself(config)


def test_blending(configured):
    """By hand, in fp32 whatever the adapter's dtype; copies are exact."""
    with one_rank_group():
        actor = make_actor(configured("actor.lora.dtype=bfloat16"))
        old, current = copies(actor, OLD), copies(actor, CURRENT)
        assert {t.dtype for t in old.values()} == {torch.float32}
        actor.blend(Blend(OLD, 0.999))
        for name, tensor in actor.weights(OLD):
            torch.testing.assert_close(tensor, 0.999 * old[name] + 0.001 * current[name].float())
        actor.blend(Blend(OLD, 1.0))
        actor.blend(Blend(OLD))
        assert all(torch.equal(tensor, current[name].float()) for name, tensor in actor.weights(OLD))
        with pytest.raises(ValueError, match="the actor holds no policy 'teacher'; it holds old, current"):
            actor.blend(Blend("teacher"))


@pytest.mark.parametrize("train", ["lora", "full"])
def test_a_stored_policy_sleeps_and_is_rolled_back_with_the_actor(configured, train):
    with one_rank_group():
        actor = make_actor(configured(f"actor.train={train}"))
        actor.blend(Blend(OLD, 0.5))
        before = copies(actor, OLD)
        actor.sleep()
        actor.wake()
        actor.keep()
        actor.blend(Blend(OLD))
        assert not all(torch.equal(tensor, before[name]) for name, tensor in actor.weights(OLD))
        actor.rollback()
        assert all(torch.equal(tensor, before[name]) for name, tensor in actor.weights(OLD))


def test_what_a_checkpoint_must_hold_of_policies(configured):
    """Adapters are saved as such; weights are among the sharded tensors, under the policy's name."""
    with one_rank_group():
        adapter, whole = make_actor(configured()), make_actor(configured("actor.train=full"))
    assert adapter.policies == whole.policies == (OLD, CURRENT)
    assert adapter.adapter_config["r"] == 4 and whole.adapter_config is None
    assert not {name for name in adapter.sharded_state() if name.startswith("old/")}
    names = [name for name, _ in whole.weights()]
    assert {f"old/{name}" for name in names} | set(names) < whole.sharded_state().keys()


def test_the_adapter_is_on_again_after_an_error(configured, tiny_model):
    config = configured()
    family = QwenImage(config.model)
    trained = TrainedAdapter(config.actor.lora, family, torch.float32, 0)
    transformer = family.load_transformer(torch.float32)
    trained.attach(transformer)
    with pytest.raises(KeyError):
        with trained.left_out(transformer):
            raise KeyError
    assert not any(getattr(module, "disable_adapters", False) is True for module in transformer.modules())


def test_labels_and_their_inverse():
    assert [label(policy) for policy in (CURRENT, REFERENCE, OLD)] == ["adapter", "base", "old"]
    assert all(policy_of(label(policy)) == policy for policy in (CURRENT, REFERENCE, OLD, "teacher"))
