"""Where adapters are while policies are compared; what is made of them: tests/cli/test_evaluate.py,
tests/test_trainer.py.
"""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from omnirl_hpc.evaluation import evaluator as module
from omnirl_hpc.evaluation.evaluator import Evaluator, collect_policies
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.rewards.gather import ScoredStep
from tests.helpers import ALONE, CPU, make_config


def test_policies_are_collected_on_the_host():
    """Tensors without values stand for those of a GPU."""
    with FakeTensorMode():
        lora = {"a": torch.ones(2, 3, device="cuda")}
        policies = collect_policies(
            SimpleNamespace(policies=("ema", "old", "current"), weights=lambda _: lora.items()),
            torch.bfloat16,
            last="old",
        )
    assert list(policies) == ["base", "ema", "adapter", "old"]
    assert {(t.device.type, t.dtype) for policy in policies.values() for t in policy.values()} == {
        ("cpu", torch.bfloat16)
    }


def test_the_one_that_is_delivered_is_on_the_device(monkeypatch):
    delivered = []
    receipt = SimpleNamespace(checksum="0")
    monkeypatch.setattr(module, "deliver_lora", lambda engine, lora, step: delivered.append(lora) or receipt)
    evaluator = Evaluator.__new__(Evaluator)
    evaluator._device, evaluator._generation = (
        torch.device("meta"),
        SimpleNamespace(engine=None, wake_engine=lambda: None),
    )
    assert evaluator._deliver({"a": torch.ones(2, 3)}, 1) == "0"
    assert [tensor.device.type for lora in delivered for tensor in lora.values()] == ["meta"]


OTHER_SETTINGS = (
    "sampling.true_cfg_scale=3",
    "evaluation.num_prompts=3",
    "evaluation.samples_per_prompt=2",
    "evaluation.num_inference_steps=7",
    "evaluation.seed=1",
    "data.negative_prompt=blurred",
    "rollout.dtype=bfloat16",
    "model.height=48",
    "reward.parts.jpeg_compressibility.weight=2",
)


@pytest.fixture
def evaluator(tiny_model, tiny_prompts, tmp_path):
    def make(*overrides: str) -> Evaluator:
        config = make_config(tiny_model, tiny_prompts, tmp_path, "evaluation.num_prompts=2", *overrides)
        return Evaluator(config, QwenImage(config.model), ALONE, CPU, None, tmp_path / "evaluation")

    return make


def test_what_decides_scores_tells_results_apart(evaluator):
    """A stored result by other settings is not taken for this one's; workers and paths decide nothing."""
    measures = [evaluator(setting).measure for setting in OTHER_SETTINGS]
    usual = evaluator().measure
    assert len({usual, *measures}) == len(OTHER_SETTINGS) + 1
    assert evaluator("reward.parts.jpeg_compressibility.workers=2").measure == usual


def test_the_standard_error_is_that_of_the_mean(evaluator):
    """The standard deviation with n - 1, divided by the root of n; without the sample that has no score."""
    rewards = torch.tensor([1.0, math.nan, 3.0, 4.0, 8.0], dtype=torch.float64)
    mask, order = ~rewards.isnan(), torch.arange(5)
    scored = ScoredStep(rewards, {"a": rewards}, mask, torch.tensor([0, 0, 0, 1, 1]), order, 0.0)
    scores = evaluator("evaluation.samples_per_prompt=3")._scores(scored, ".png")
    valid = [1.0, 3.0, 4.0, 8.0]
    assert scores["reward"] == 4.0
    assert scores["standard_error"] == pytest.approx(statistics.stdev(valid) / 4**0.5)
    one = ScoredStep(rewards[:2], {"a": rewards[:2]}, mask[:2], torch.tensor([0, 0]), order[:2], 0.0)
    assert evaluator()._scores(one, ".png")["standard_error"] == 0
