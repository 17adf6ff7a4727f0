"""Who has the device, and what happens to those who use it out of turn."""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.actor.fsdp import FSDPActor
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.metrics.memory import DevicePeaks
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.models.lora import lora_parameters
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.policies import CURRENT, EMA, Blend
from omnirl_hpc.residency import ACTOR, REWARD, ROLLOUT, Residency, settle_residency
from omnirl_hpc.rollout.diffusers_engine import DiffusersEngine
from omnirl_hpc.sync import collect_lora
from tests.helpers import ALONE, CPU, make_config, one_rank_group


class Tenant:
    """Notes what is asked of it. All write in one list."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def __getattr__(self, method: str):
        return lambda: self._calls.append(f"{self._name}.{method}")


def make(mode: str, *rollout: str) -> tuple[Residency, list[str], PhaseTimer]:
    calls: list[str] = []
    timer = PhaseTimer(CPU)
    residency = Residency(mode, timer, DevicePeaks(CPU))
    residency.add(ACTOR, Tenant("actor", calls))
    for name in rollout:
        residency.add(ROLLOUT, Tenant(name, calls))
    return residency, calls, timer


def test_one_side_leaves_before_the_other_comes():
    residency, calls, timer = make("swap", "engine", "encoders")
    assert calls == ["actor.sleep"]  # as soon as it was built
    residency.give_to(ACTOR)
    assert calls[1:] == ["engine.sleep", "encoders.sleep", "actor.wake"]
    residency.give_to(ROLLOUT)
    assert calls[4:] == ["actor.sleep", "engine.wake", "encoders.wake"]
    assert timer.take()["time/swap"] > 0


def test_the_engine_has_the_device_first():
    """It was built on a device that it had to itself."""
    residency, calls, _ = make("swap", "engine")
    residency.give_to(ROLLOUT)
    assert calls == ["actor.sleep"]


def test_a_reward_on_the_device_takes_its_turn():
    """Between engine and actor, with the device to itself."""
    residency, calls, _ = make("swap", "engine")
    residency.add(REWARD, Tenant("reward", calls))
    for side in (REWARD, ACTOR, ROLLOUT):
        residency.give_to(side)
    assert calls == [
        *("actor.sleep", "reward.sleep"),
        *("engine.sleep", "reward.wake"),
        *("reward.sleep", "actor.wake"),
        *("actor.sleep", "engine.wake"),
    ]


def test_where_no_reward_needs_the_device_nothing_moves_for_scores():
    residency, calls, _ = make("swap", "engine")
    residency.give_to(REWARD)
    residency.give_to(ACTOR)
    assert calls == ["actor.sleep", "engine.sleep", "actor.wake"]


@pytest.mark.parametrize("side", [ROLLOUT, ACTOR])
def test_asking_twice_moves_nothing(side):
    residency, calls, _ = make("swap", "engine")
    residency.give_to(side)
    before = list(calls)
    residency.give_to(side)
    assert calls == before


def test_residents_never_move():
    residency, calls, timer = make("resident", "engine")
    for _ in range(2):
        residency.give_to(ROLLOUT)
        residency.give_to(ACTOR)
    assert calls == []
    assert "time/swap" not in timer.take()


def test_who_has_the_device_alone_keeps_it():
    residency, calls, _ = make("swap")
    for side in (ACTOR, ROLLOUT, ACTOR):
        residency.give_to(side)
    assert calls == ["actor.sleep", "actor.wake"]


def test_peaks_are_booked_to_the_side_that_had_the_device():
    booked = []
    peaks = DevicePeaks(CPU)
    peaks.book = booked.append
    residency = Residency("swap", PhaseTimer(CPU), peaks)
    for side in (ROLLOUT, ACTOR):
        residency.add(side, Tenant(side, []))
    for side in (ACTOR, ROLLOUT, ROLLOUT):
        residency.give_to(side)
    assert booked == ["rollout", "actor"]


@pytest.fixture(scope="module")
def config(tiny_model, tiny_prompts, tmp_path_factory):
    return make_config(tiny_model, tiny_prompts, tmp_path_factory.mktemp("run"), "actor.ema_decay=0.9")


def test_auto_without_a_gpu_has_nothing_to_share(tiny_model, tiny_prompts, tmp_path):
    config = make_config(tiny_model, tiny_prompts, tmp_path, "residency=auto")
    assert settle_residency(config, ALONE, CPU) == "there is no GPU to share"
    assert config.residency == "resident"


def test_an_engine_used_asleep_says_so_and_awake_is_what_it_was(config):
    engine = DiffusersEngine(config, QwenImage(config.model), CPU, PhaseTimer(CPU))
    before = engine.encode(Prompt("0", "a cat"))["embeds"]
    lora = {
        name: tensor.detach().clone()
        for name, tensor in lora_parameters(engine._pipeline.transformer).items()
    }
    engine.sleep()
    for use in (
        lambda: engine.encode(Prompt("0", "a cat")),
        lambda: list(engine.generate([])),
        lambda: engine.load_lora(lora, 1),
        engine.sleep,
    ):
        with pytest.raises(RuntimeError, match="the engine is asleep: wake"):
            use()
    for module in (engine._pipeline.transformer, engine._pipeline.text_encoder, engine._pipeline.vae):
        assert all(t.untyped_storage().nbytes() == 0 for t in [*module.parameters(), *module.buffers()])
    engine.wake()
    assert torch.equal(engine.encode(Prompt("0", "a cat"))["embeds"], before)
    assert all(
        torch.equal(t, lora[name]) for name, t in lora_parameters(engine._pipeline.transformer).items()
    )


def test_an_actor_used_asleep_says_so_and_holds_no_memory(config):
    with one_rank_group():
        actor = FSDPActor(config, QwenImage(config.model), ALONE, CPU)
        lora = {name: tensor.clone() for name, tensor in actor.weights()}
        for_the_engine = collect_lora(actor, torch.float32)  # made before the swap and used after it
        actor.sleep()
        assert all(torch.equal(for_the_engine[name], lora[name]) for name in lora)
        uses = {
            "velocity": lambda: actor.velocity(None, CURRENT),
            "apply_gradients": actor.apply_gradients,
            "weights": lambda: list(actor.weights()),
            "weights of another policy": lambda: list(actor.weights(EMA)),
            "load": lambda: actor.load(CURRENT, lora),
            "blend": lambda: actor.blend(Blend(EMA, 0.5)),
            "full_optimizer_state": lambda: list(actor.full_optimizer_state()),
            "sharded_state": actor.sharded_state,
        }
        for name, use in uses.items():
            with pytest.raises(RuntimeError, match="the actor is asleep: wake"):
                print(name, use())
        held = [t.to_local() for t in actor._transformer.parameters()]
        assert sum(t.untyped_storage().nbytes() for t in held) == 0
        actor.wake()
        assert all(torch.equal(t, lora[name]) for name, t in actor.weights())
