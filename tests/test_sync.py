"""LoRA arrives in the engine, or the run stops."""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.errors import SyncError
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.models.lora import add_lora, lora_parameters
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.policies import CURRENT
from omnirl_hpc.rollout import make_engine
from omnirl_hpc.rollout.engine import Receipt
from omnirl_hpc.sync import collect_lora, deliver_lora
from tests.helpers import ALONE, CPU, fill_adapter, make_config

SOME = "transformer_blocks.1.attn.to_q.lora_A.weight"


class Trained:
    """An actor's adapter after some training."""

    def __init__(self, config):
        family = QwenImage(config.model)
        transformer = family.load_transformer(torch.float32)
        add_lora(transformer, config.actor.lora, family.spec.lora_targets, torch.float32, config.seed)
        fill_adapter(transformer, seed=3)
        self.state = {name: parameter.detach() for name, parameter in lora_parameters(transformer).items()}

    def weights(self, policy=CURRENT, dtype=None):
        return self.state.items()


class Faulty:
    """An engine that is given a changed state, or tells a changed receipt."""

    def __init__(self, engine, state=lambda state: state, receipt=lambda receipt: receipt):
        self.engine, self.change_state, self.change_receipt = engine, state, receipt

    def load_lora(self, state, version):
        return self.change_receipt(self.engine.load_lora(self.change_state(dict(state)), version))


@pytest.fixture(params=["float32", "bfloat16"])
def config(request, tiny_model, tiny_prompts, tmp_path):
    return make_config(tiny_model, tiny_prompts, tmp_path, f"rollout.dtype={request.param}")


@pytest.fixture
def engine(config):
    return make_engine(config, QwenImage(config.model), ALONE, CPU, PhaseTimer(CPU))


def sync(config, engine, version=1):
    return deliver_lora(engine, collect_lora(Trained(config), getattr(torch, config.rollout.dtype)), version)


def test_what_arrives_is_what_was_sent(config, engine):
    receipt = sync(config, engine, version=7)
    assert receipt.version == 7
    assert len(receipt.bound) == 24
    sent = Trained(config).state
    slots = lora_parameters(engine._pipeline.transformer)
    assert slots.keys() == sent.keys()
    dtype = getattr(torch, config.rollout.dtype)
    assert all(slots[name].dtype == dtype and torch.equal(slots[name], sent[name].to(dtype)) for name in sent)
    assert sync(config, engine, version=8).checksum == receipt.checksum


def test_what_was_collected_outlives_the_actors_memory(config):
    """An actor may be offloaded before the engine takes the adapter."""
    dtype = getattr(torch, config.rollout.dtype)
    actor, kept = Trained(config), Trained(config).state
    collected = collect_lora(actor, dtype)
    for tensor in dict(actor.weights()).values():
        tensor.fill_(torch.nan)
    assert all(torch.equal(collected[name], kept[name].to(dtype)) for name in kept)


def test_an_engine_that_lacks_a_module_stops_the_run(config, tiny_model, tiny_prompts, tmp_path):
    targets = [target for target in QwenImage.spec.lora_targets if target != "to_q"]
    other = make_config(
        tiny_model,
        tiny_prompts,
        tmp_path,
        f"rollout.dtype={config.rollout.dtype}",
        f"actor.lora.target_modules=[{','.join(targets)}]",
    )
    engine = make_engine(other, QwenImage(other.model), ALONE, CPU, PhaseTimer(CPU))
    with pytest.raises(SyncError) as error:
        sync(config, engine)
    assert str(error.value) == (
        "LoRA version 1: the actor trains 24 modules, the engine has bound 22; "
        "only in the actor: transformer_blocks.0.attn.to_q, transformer_blocks.1.attn.to_q; "
        "only in the engine: none"
    )


def test_an_engine_with_a_module_more_stops_the_run(config, engine):
    actor = Trained(config)
    actor.state = {
        name: tensor for name, tensor in actor.state.items() if ".1." not in name or ".img_mlp." in name
    }
    with pytest.raises(
        SyncError,
        match=(
            "trains 14 modules, .* has bound 24; only in the actor: none; only in the engine: .* and 7 more"
        ),
    ):
        deliver_lora(engine, collect_lora(actor, getattr(torch, config.rollout.dtype)), version=1)


def one_bit(state):
    """The lowest bit of one value."""
    state[SOME] = state[SOME].clone()
    integers = {2: torch.int16, 4: torch.int32}[state[SOME].element_size()]
    state[SOME].view(integers)[1, 2] ^= 1
    return state


def swapped(state):
    """Two modules of equal shape in each other's places."""
    other = SOME.replace("to_q", "to_k")
    state[SOME], state[other] = state[other], state[SOME]
    return state


def stale(state):
    """One module is not written: the engine computes with what was there before."""
    del state[SOME]
    return state


@pytest.mark.parametrize("fault", [one_bit, swapped, stale])
def test_wrong_values_stop_the_run(config, engine, fault):
    right = sync(config, make_engine(config, QwenImage(config.model), ALONE, CPU, PhaseTimer(CPU))).checksum
    with pytest.raises(
        SyncError,
        match=rf"the actor sent {right}, the engine computes with (?!{right})[0-9a-f]{{16}} \(version 1\)",
    ):
        sync(config, Faulty(engine, state=fault))


def test_an_old_version_stops_the_run(config, engine):
    def previous(receipt):
        return Receipt(receipt.version - 1, receipt.bound, receipt.checksum)

    with pytest.raises(SyncError, match=r"LoRA version 5: .* \(version 4\)"):
        sync(config, Faulty(engine, receipt=previous), version=5)
