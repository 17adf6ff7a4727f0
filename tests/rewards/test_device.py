"""A reward that lives on the device."""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.config.schema import RewardConfig, RewardPartConfig
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.errors import RewardError
from omnirl_hpc.rewards.device import DeviceRunner
from omnirl_hpc.rewards.mix import RewardMix
from omnirl_hpc.rewards.reward import RewardBatch
from tests.helpers import CPU

SETTINGS = RewardPartConfig("tests.toy_reward_on_device:Blend")
BLACK, RED = [0, 0, 0], [255, 0, 51]


def batch(*colours: list[int]) -> RewardBatch:
    frames = torch.tensor(colours, dtype=torch.uint8)[:, None, None, None].expand(-1, 2, 4, 4, -1)
    return RewardBatch(frames, [Prompt(str(i), "a") for i in range(len(colours))])


def test_scores_and_what_they_are_made_of_in_the_order_of_submission():
    runner = DeviceRunner("blend", SETTINGS, CPU)
    runner.wait_until_made()
    for colours in ((RED, BLACK), (BLACK,)):
        runner.submit(batch(*colours))
    scores = runner.collect()
    assert scores.values == pytest.approx([0.8, 0, 0]) and scores.errors == []
    assert scores.components == {"red": [1, 0, 0], "blue": pytest.approx([0.2, 0, 0])}
    assert runner.collect().values == []


def test_it_sleeps_without_memory_and_wakes_as_it_was():
    runner = DeviceRunner("blend", SETTINGS, CPU)
    weight = runner._reward.layer.weight
    before = weight.clone()
    runner.submit(batch(RED))
    runner.sleep()
    assert weight.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="reward blend is asleep"):
        runner.collect()
    runner.wake()
    assert torch.equal(weight, before) and runner.collect().values == pytest.approx([0.8])


def test_a_failed_call_has_neither_scores_nor_components():
    runner = DeviceRunner("blend", SETTINGS, CPU)
    runner.submit(batch(RED))
    runner.submit(RewardBatch(None, [Prompt("0", "a")]))
    scores = runner.collect()
    assert scores.values == pytest.approx([0.8, float("nan")], nan_ok=True)
    assert scores.components["red"] == pytest.approx([1, float("nan")], nan_ok=True)
    assert [error.split(" (")[0] for error in scores.errors] == [
        "AttributeError: 'NoneType' object has no attribute 'float'"
    ]


def test_networks_that_do_not_fit_are_an_error_that_names_it(monkeypatch):
    def too_large(self, device):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch.nn.Module, "to", too_large)
    with pytest.raises(RewardError, match="^reward blend could not be made: .*out of memory"):
        DeviceRunner("blend", SETTINGS, CPU).wait_until_made()


def test_each_part_gets_what_it_needs_and_may_change_it():
    """Latents in threads, frames on the device; neither training nor the others see what one changes."""
    parts = {
        "blend": SETTINGS,
        "latents": RewardPartConfig("tests.rewards.scripted:ZeroesItsLatents"),
        "calm": RewardPartConfig("tests.toy_reward_in_thread:CalmLatents"),
    }
    mix = RewardMix(RewardConfig(parts), CPU)
    assert [runner._name for runner in mix.tenants] == ["blend"]
    given = batch(RED, BLACK)
    latents = {"video": torch.ones(2, 3), "audio": 2 * torch.ones(2, 4, 4)}
    mix.submit(
        RewardBatch(given.frames, given.prompts, audio=torch.ones(2, 1, 5), sample_rate=8, latents=latents)
    )
    scores = mix.collect()
    mix.close()
    assert [part.errors for part in scores.values()] == [[], [], []]
    assert scores["blend"].values == pytest.approx([0.8, 0]) and scores["calm"].values == [-2.5, -2.5]
    assert all(bool(tensor.all()) for tensor in latents.values())
