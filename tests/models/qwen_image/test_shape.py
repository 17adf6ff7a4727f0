"""The shape of published Qwen-Image. Expected values: diffusers, and shared/reference/field.md."""

from __future__ import annotations

import inspect

import pytest
from diffusers import QwenImageTransformer2DModel

from omnirl_hpc.config.schema import ModelConfig
from omnirl_hpc.models.qwen_image.shape import PUBLISHED, QwenImageShape


def published(**model: int) -> QwenImageShape:
    return QwenImageShape.find(ModelConfig(path="-", **model))


def test_published_transformer_is_diffusers_default():
    defaults = inspect.signature(QwenImageTransformer2DModel.__init__).parameters
    assert PUBLISHED == {name: defaults[name].default for name in PUBLISHED}


def test_lora_of_the_reference_recipe():
    assert published().lora_parameters(64, None) == pytest.approx(424.7e6, rel=1e-4)  # field.md E.5


@pytest.mark.parametrize(
    "pixels, tokens, expected", [(512, 64, 15.7e12), (512, 256, 18.6e12), (1024, 64, 69.3e12)]
)
def test_flops_of_a_forward_pass(pixels, tokens, expected):
    """Expected: table E.2 of field.md, three digits."""
    assert published(height=pixels, width=pixels).forward_flops(tokens) == pytest.approx(expected, rel=0.004)


def test_flops_of_the_backward_pass():
    """flops.py of shared/reference: the linear part once, attention 2.5 times."""
    shape = published()
    attention = 4 * 60 * 24 * 128 * (1024 + 64) ** 2
    assert shape.attention_flops(64) == attention
    assert shape.lora_backward_flops(64) - shape.forward_flops(64) == pytest.approx(1.5 * attention)
    assert shape.full_backward_flops(64) == pytest.approx(
        2 * (shape.forward_flops(64) - attention) + 2.5 * attention
    )
