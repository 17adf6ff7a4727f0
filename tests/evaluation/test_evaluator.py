"""Where adapters are while policies are compared; what is made of them: tests/cli/test_evaluate.py,
tests/test_trainer.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from omnirl_hpc.evaluation import evaluator as module
from omnirl_hpc.evaluation.evaluator import Evaluator, collect_policies


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
    evaluator._device, evaluator._generation = torch.device("meta"), SimpleNamespace(engine=None)
    assert evaluator._deliver({"a": torch.ones(2, 3)}, 1) == "0"
    assert [tensor.device.type for lora in delivered for tensor in lora.values()] == ["meta"]
