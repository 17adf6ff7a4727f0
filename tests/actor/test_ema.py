"""The running mean of the adapter: its formula, its state in an actor that swaps, its way through a
checkpoint.
"""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.actor.ema import ema_blend
from omnirl_hpc.actor.fsdp import FSDPActor
from omnirl_hpc.actor.update import apply_gradients
from omnirl_hpc.errors import CheckpointError
from omnirl_hpc.metrics.accumulator import Accumulator
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.policies import CURRENT, EMA
from tests.helpers import ALONE, CPU, make_config, one_rank_group

DECAY = 0.75


def test_the_decay_is_that_of_a_plain_mean_until_its_limit():
    """By hand: after update t the weight of the old mean is t / (t + 1), and 3 / 4 is reached at t = 3."""
    blends = [ema_blend(update, DECAY) for update in (1, 2, 3, 4, 50)]
    assert [blend.decay for blend in blends] == pytest.approx([1 / 2, 2 / 3, 3 / 4, 3 / 4, 3 / 4])
    assert {(blend.policy, blend.source) for blend in blends} == {(EMA, CURRENT)}


@pytest.fixture(scope="module")
def actor(tiny_model, tiny_prompts, tmp_path_factory):
    config = make_config(tiny_model, tiny_prompts, tmp_path_factory.mktemp("run"), f"actor.ema_decay={DECAY}")
    with one_rank_group():
        yield FSDPActor(config, QwenImage(config.model), ALONE, CPU)


def learn(actor, gradient: float) -> None:
    for parameter in actor._parameters.values():
        parameter.grad = torch.full_like(parameter, gradient)
    apply_gradients(actor, Accumulator(CPU), DECAY)


def copies(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_an_actor_keeps_the_mean_of_its_updates_through_swaps_and_undoes_it(actor):
    seen = [copies(dict(actor.weights()))]
    assert same(dict(actor.weights(EMA)), seen[0])
    learn(actor, 1.0)
    seen.append(copies(dict(actor.weights())))
    actor.sleep()
    actor.wake()
    actor.keep()
    kept = copies(dict(actor.weights(EMA)))
    learn(actor, -2.0)
    seen.append(copies(dict(actor.weights())))
    mean = dict(actor.weights(EMA))
    for name in mean:
        torch.testing.assert_close(mean[name], torch.stack([state[name] for state in seen]).mean(0))
    assert not same(mean, kept)
    actor.rollback()
    assert same(dict(actor.weights(EMA)), kept) and same(dict(actor.weights()), seen[1])


def test_a_mean_can_be_put_back_and_another_models_is_refused(actor):
    given = {name: torch.randn_like(tensor) for name, tensor in dict(actor.weights(EMA)).items()}
    actor.load(EMA, given)
    assert same(dict(actor.weights(EMA)), given)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        actor.load(EMA, {})


def test_no_mean_unless_asked(actor, tiny_model, tiny_prompts, tmp_path):
    config = make_config(tiny_model, tiny_prompts, tmp_path)
    assert FSDPActor(config, QwenImage(config.model), ALONE, CPU).policies == (CURRENT,)
