"""Adapters: where they go, and what they start as."""

from __future__ import annotations

import pytest
import torch
from diffusers import QwenImageTransformer2DModel

from omnirl_hpc.config.schema import LoraConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.models.lora import add_lora, lora_modules, lora_parameters
from omnirl_hpc.models.qwen_image.family import QwenImage

CONFIG = LoraConfig(rank=4, alpha=8)


def load(tiny_model, dtype=torch.float32):
    return QwenImageTransformer2DModel.from_pretrained(tiny_model, subfolder="transformer", dtype=dtype)


def adapted(tiny_model, seed, dtype=torch.float32, targets=QwenImage.spec.lora_targets):
    transformer = load(tiny_model)
    add_lora(transformer, CONFIG, targets, dtype, seed)
    return lora_parameters(transformer)


def test_every_target_of_every_block_is_adapted(tiny_model):
    transformer = load(tiny_model)
    add_lora(transformer, CONFIG, QwenImage.spec.lora_targets, torch.float32, seed=0)
    parameters = lora_parameters(transformer)
    modules = lora_modules(parameters)
    assert len(modules) == 24  # 2 blocks x 12 targets
    assert modules == {
        f"transformer_blocks.{block}.{place}{target}"
        for block in range(2)
        for target in QwenImage.spec.lora_targets
        for place in ("" if "mlp" in target else "attn.",)
    }
    assert {name for name, p in transformer.named_parameters() if p.requires_grad} == {
        name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")
        for name in parameters
    }
    q = (
        parameters["transformer_blocks.0.attn.to_q.lora_A.weight"],
        parameters["transformer_blocks.0.attn.to_q.lora_B.weight"],
    )
    assert [p.shape for p in q] == [(4, 64), (64, 4)]


def test_initial_adapter_is_a_function_of_the_seed(tiny_model):
    torch.manual_seed(1)
    first = adapted(tiny_model, seed=0)
    torch.manual_seed(2)  # another rank, another history of random draws
    state = torch.get_rng_state()
    second = adapted(tiny_model, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    other = adapted(tiny_model, seed=1)
    for name in first:
        assert torch.equal(first[name], second[name])
        if ".lora_B." in name:
            assert not first[name].any()
        else:
            assert not torch.equal(first[name], other[name])


def test_initial_a_has_standard_deviation_one_over_rank(tiny_model):
    """PEFT's "gaussian". Of 9,216 values: the standard error of the deviation is below 1 % of it."""
    first, second = (
        torch.cat(
            [p.detach().flatten() for name, p in adapted(tiny_model, seed).items() if ".lora_A." in name]
        )
        for seed in (0, 1)
    )
    for values in (first, second):
        assert values.mean().abs() < 0.01
        assert values.std() == pytest.approx(1 / CONFIG.rank, rel=0.05)
    assert torch.corrcoef(torch.stack([first, second]))[0, 1].abs() < 0.06


def test_adapter_has_its_own_dtype(tiny_model):
    transformer = load(tiny_model, torch.bfloat16)
    add_lora(transformer, CONFIG, ["to_q"], torch.float32, seed=0)
    assert {p.dtype for p in lora_parameters(transformer).values()} == {torch.float32}
    assert transformer.transformer_blocks[0].attn.to_q.base_layer.weight.dtype == torch.bfloat16
    # the same values as under any other base: drawn in fp32, not rounded on the way
    expected = adapted(tiny_model, seed=0, targets=["to_q"])
    for name, parameter in lora_parameters(transformer).items():
        assert torch.equal(parameter, expected[name])


@pytest.mark.parametrize("missing", ["to_qq", "q", "norm1", "transformer_blocks.7.attn.to_q"])
def test_target_that_matches_nothing_is_refused(tiny_model, missing):
    with pytest.raises(
        ConfigError, match=f"actor.lora.target_modules: no linear layer of .* is named {missing}$"
    ):
        adapted(tiny_model, seed=0, targets=["to_q", missing])
