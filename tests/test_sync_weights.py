"""All weights arrive in the engine, asleep or awake, or the run stops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from omnirl_hpc.errors import SyncError
from omnirl_hpc.hashing import state_checksum
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.policies import CURRENT
from omnirl_hpc.rollout import make_engine
from omnirl_hpc.rollout.engine import Receipt, SampleRequest
from omnirl_hpc.sampling.noise import standard_normal
from omnirl_hpc.sampling.samples import SampleIdentity, Samples
from omnirl_hpc.sampling.streams import LATENTS
from omnirl_hpc.sampling.windows import Window
from omnirl_hpc.sync import confirm_weights, send_weights
from tests.helpers import ALONE, CPU, make_config
from tests.sync_cases import ALL, SOME, TEARS, Torn, Weights


@pytest.fixture(params=["float32", "bfloat16"])
def config(request, tiny_model, tiny_prompts, tmp_path):
    return make_config(
        tiny_model, tiny_prompts, tmp_path, f"rollout.dtype={request.param}", "actor.train=full"
    )


@pytest.fixture
def engine(config):
    return make_engine(config, QwenImage(config.model), ALONE, CPU, PhaseTimer(CPU))


def sync(config, engine, weights, version: int = 1, asleep: bool = True) -> Receipt:
    if asleep:
        engine.sleep()
    sent = send_weights(weights, engine, getattr(torch, config.rollout.dtype), version)
    engine.wake()
    return confirm_weights(engine, sent, version)


def generate(engine, dtype: str) -> Tensor:
    """The latents of one sample's window."""
    text, negative = (
        standard_normal((length, 32), 0, "text", length).to(getattr(torch, dtype)) for length in (7, 3)
    )
    identity = SampleIdentity(0, 0, "0", 0)
    request = SampleRequest(identity, 0, Window(0, 2), {"embeds": text}, {"embeds": negative}, width=64)
    return Samples.cat(list(engine.generate([request]))).trajectory.latents[LATENTS]


@pytest.mark.parametrize("asleep", [True, False])
def test_what_arrives_is_what_was_sent(config, engine, asleep):
    """In the places that the engine computes with, and still there after the next sleep."""
    weights, dtype = Weights(config, seed=1), getattr(torch, config.rollout.dtype)
    expected = {name: tensor.clone() for name, tensor in weights.weights(CURRENT, dtype)}
    engine.sleep()  # makes the copies on the host
    engine.wake()
    receipt = sync(config, engine, weights, version=7, asleep=asleep)
    assert receipt.version == 7 and len(receipt.bound) == ALL and receipt.checksum == state_checksum(expected)
    for _ in range(2):
        held = dict(engine._pipeline.transformer.named_parameters())
        assert all(held[name].dtype == dtype and torch.equal(held[name], expected[name]) for name in expected)
        engine.sleep()
        engine.wake()


def test_the_engine_computes_with_them(config, engine):
    """As an engine does whose checkpoint has these weights, to the bit; and the old ones bring the old images
    back.
    """
    before = generate(engine, config.rollout.dtype)
    sync(config, engine, Weights(config, seed=1), version=3)
    changed = generate(engine, config.rollout.dtype)
    assert not torch.equal(changed, before)
    plain = make_engine(config, QwenImage(config.model), ALONE, CPU, PhaseTimer(CPU))
    with torch.no_grad():
        for name, tensor in Weights(config, seed=1).weights(CURRENT, getattr(torch, config.rollout.dtype)):
            plain._pipeline.transformer.get_parameter(name).copy_(tensor)
    assert torch.equal(generate(plain, config.rollout.dtype), changed)
    sync(config, engine, Weights(config, seed=None))
    assert torch.equal(generate(engine, config.rollout.dtype), before)


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_sync_stops_the_run(config, engine, tear):
    with pytest.raises(
        SyncError,
        match=rf"weights version 1: the engine computes with other values .* of 77 weights: .*{SOME}",
    ):
        sync(config, Torn(engine, tear), Weights(config, seed=1))


def test_weights_that_only_one_side_has_are_named(config, engine):
    weights = Weights(config, seed=1)
    weights.names = {"img_in.weight": "nothing.weight"}
    with pytest.raises(SyncError) as error:
        sync(config, engine, weights)
    assert str(error.value) == (
        "weights version 1: the actor trains 77 weights, the engine has bound 77; only in the actor: "
        "nothing.weight; only in the engine: img_in.weight"
    )
