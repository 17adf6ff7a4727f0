"""The running mean of the adapter: its formula, its state in an actor that swaps, its way through a
checkpoint.
"""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.actor.ema import ema_decay, update_ema
from omnirl_hpc.actor.fsdp import FSDPActor
from omnirl_hpc.errors import CheckpointError
from omnirl_hpc.models.qwen_image.family import QwenImage
from tests.helpers import ALONE, CPU, make_config, one_rank_group

DECAY = 0.75


def test_the_decay_is_that_of_a_plain_mean_until_its_limit():
    """By hand: after update t the weight of the old mean is t / (t + 1), and 3 / 4 is reached at t = 3."""
    decays = [ema_decay(update, DECAY) for update in (1, 2, 3, 4, 50)]
    assert decays == pytest.approx([1 / 2, 2 / 3, 3 / 4, 3 / 4, 3 / 4])


def test_the_mean_of_the_first_updates_is_the_plain_mean_of_all_weights():
    mean, seen = {"w": torch.zeros(3)}, [torch.zeros(3)]
    for update in (1, 2, 3):
        seen.append(torch.full((3,), float(update)))
        update_ema(mean, {"w": seen[-1].bfloat16()}, ema_decay(update, DECAY))
        assert mean["w"].dtype == torch.float32
        torch.testing.assert_close(mean["w"], torch.stack(seen).mean(0))
    update_ema(mean, {"w": torch.full((3,), 9.0)}, ema_decay(4, DECAY))
    torch.testing.assert_close(mean["w"], torch.full((3,), 0.75 * 1.5 + 0.25 * 9))


@pytest.fixture(scope="module")
def actor(tiny_model, tiny_prompts, tmp_path_factory):
    config = make_config(tiny_model, tiny_prompts, tmp_path_factory.mktemp("run"), f"actor.ema_decay={DECAY}")
    with one_rank_group():
        yield FSDPActor(config, QwenImage(config.model), ALONE, CPU)


def learn(actor, gradient: float) -> None:
    for parameter in actor._parameters.values():
        parameter.grad = torch.full_like(parameter, gradient)
    actor.apply_gradients()


def copies(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_an_actor_keeps_the_mean_of_its_updates_through_swaps_and_undoes_it(actor):
    seen = [copies(actor.lora_state())]
    assert same(actor.ema_state(), seen[0])
    learn(actor, 1.0)
    seen.append(copies(actor.lora_state()))
    actor.offload()
    actor.onload()
    actor.keep()
    kept = copies(actor.ema_state())
    learn(actor, -2.0)
    seen.append(copies(actor.lora_state()))
    mean = actor.ema_state()
    for name in mean:
        torch.testing.assert_close(mean[name], torch.stack([state[name] for state in seen]).mean(0))
    assert not same(mean, kept)
    actor.rollback()
    assert same(actor.ema_state(), kept) and same(actor.lora_state(), seen[1])


def test_a_mean_can_be_put_back_and_another_models_is_refused(actor):
    given = {name: torch.randn_like(tensor) for name, tensor in actor.ema_state().items()}
    actor.load_ema_state(given)
    assert same(actor.ema_state(), given)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        actor.load_ema_state({})


def test_no_mean_unless_asked(actor, tiny_model, tiny_prompts, tmp_path):
    config = make_config(tiny_model, tiny_prompts, tmp_path)
    assert FSDPActor(config, QwenImage(config.model), ALONE, CPU).ema_state() is None
