"""Weights leave the device and come back as they were loaded. Needs no vllm."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from omnirl_hpc.errors import EngineError
from omnirl_hpc.rollout.vllm_omni.sleep import SleepingWeights
from tests.helpers import CPU


class Pipeline(nn.Module):
    """Components with tied weights, a buffer, odd sizes, two dtypes, and weights mapped from a file."""

    def __init__(self, folder) -> None:
        super().__init__()
        self.transformer = nn.Sequential(
            nn.Linear(3, 5), nn.Linear(5, 3).to(torch.bfloat16), nn.BatchNorm1d(3)
        )
        self.text_encoder = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7, bias=False))
        self.text_encoder[1].weight = self.text_encoder[0].weight
        self.vae = nn.Linear(3, 3)
        save_file({"weight": torch.arange(9.0).view(3, 3)}, folder / "vae.safetensors")
        self.vae.weight.data = load_file(folder / "vae.safetensors")["weight"]


@pytest.fixture
def pipeline(tmp_path):
    torch.manual_seed(0)
    return Pipeline(tmp_path)


def copies(pipeline: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}


def test_sleep_empties_and_wake_restores_what_was_saved(pipeline):
    before = copies(pipeline)
    weights = SleepingWeights(pipeline, [], CPU)
    weights.save()
    with torch.no_grad():
        pipeline.transformer[0].weight.add_(1.0)  # a merged adapter
    for _ in range(2):
        weights.sleep()
        assert weights.asleep
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in pipeline.state_dict().values())
        weights.wake()
        assert not weights.asleep
        assert all(torch.equal(tensor, before[name]) for name, tensor in pipeline.state_dict().items())
    assert pipeline.text_encoder[0].weight.data_ptr() == pipeline.text_encoder[1].weight.data_ptr()


def test_views_and_changed_weights_have_clean_values(pipeline):
    weights = SleepingWeights(pipeline, [], CPU)
    weights.save()
    for weight in (
        pipeline.transformer[0].weight.data[2:4],
        pipeline.transformer[1].weight.data,
        pipeline.vae.weight.data[1:],
    ):
        before = weight.clone()
        weight.zero_()
        assert torch.equal(weights.clean(weight), before)
        weight.copy_(weights.clean(weight))
        assert torch.equal(weight, before)


def test_named_components_stay_awake(pipeline):
    weights = SleepingWeights(pipeline, ["text_encoder", "vae"], CPU)
    decoded = pipeline.vae(pipeline.text_encoder[0](torch.tensor([1, 2])))
    weights.sleep()
    assert pipeline.transformer[0].weight.untyped_storage().nbytes() == 0
    assert torch.equal(pipeline.vae(pipeline.text_encoder[0](torch.tensor([1, 2]))), decoded)


def test_an_unknown_component_is_named(pipeline):
    with pytest.raises(EngineError, match="rollout.awake names audio, which Pipeline does not have"):
        SleepingWeights(pipeline, ["vae", "audio"], CPU)
