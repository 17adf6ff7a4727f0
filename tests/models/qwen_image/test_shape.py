"""The shape of Qwen-Image is that of its models. Expected values: the models, and
shared/reference/field.md.
"""

from __future__ import annotations

import inspect
import json

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from safetensors.torch import save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from omnirl_hpc.config.schema import LoraConfig, ModelConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.models.lora import add_lora, lora_parameters
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.models.qwen_image.shape import LORA_TARGETS, PUBLISHED, PUBLISHED_PARTS, QwenImageShape
from omnirl_hpc.models.shape import count_parameters

# Qwen/Qwen2.5-VL-7B-Instruct's config.json, as far as it decides the number of parameters
TEXT = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 14,
}


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def published(**model: int) -> QwenImageShape:
    return QwenImageShape.find(ModelConfig(path="-", **model))


@pytest.fixture(scope="module")
def tiny(tiny_model) -> QwenImageShape:
    return QwenImageShape.find(ModelConfig(path=str(tiny_model), height=32, width=48))


@pytest.fixture
def transformer(tiny_model) -> nn.Module:
    return QwenImage(ModelConfig(path=str(tiny_model))).load_transformer(torch.float32)


def test_published_parts():
    with torch.device("meta"):
        assert published().transformer_parameters == size(QwenImageTransformer2DModel())
        assert PUBLISHED_PARTS["vae"] == size(AutoencoderKLQwenImage())
        text_encoder = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False)
        )
    assert PUBLISHED_PARTS["text_encoder"] == size(text_encoder)


def test_published_transformer_is_diffusers_default():
    defaults = inspect.signature(QwenImageTransformer2DModel.__init__).parameters
    assert PUBLISHED == {name: defaults[name].default for name in PUBLISHED}


def test_parts_of_a_checkpoint(tiny, tiny_model, transformer):
    pipeline = QwenImage(ModelConfig(path=str(tiny_model))).load_pipeline(torch.float32)
    assert tiny.transformer_parameters == size(transformer)
    assert tiny.other_parameters["text_encoder"] == size(pipeline.text_encoder)
    assert tiny.other_parameters["vae"] == size(pipeline.vae)
    assert tiny.block_parameters == size(transformer.transformer_blocks[0])
    modulation = [block.img_mod for block in transformer.transformer_blocks] + [
        b.txt_mod for b in transformer.transformer_blocks
    ]
    assert tiny.modulation_parameters == sum(map(size, modulation))
    assert str(tiny_model) in tiny.source and "as published" in published().source


@pytest.mark.parametrize("targets", [None, ["to_q", "to_out.0"], ["txt_mlp.net.2", "img_mod.1"]])
def test_lora_is_what_peft_makes(tiny, transformer, targets):
    add_lora(transformer, LoraConfig(rank=4), targets or LORA_TARGETS, torch.float32, seed=0)
    made = lora_parameters(transformer)
    assert tiny.lora_parameters(4, targets) == sum(parameter.numel() for parameter in made.values())
    assert tiny.lora_layers(targets) * tiny.layers == len(made) / 2


def test_lora_of_the_reference_recipe():
    assert published().lora_parameters(64, None) == pytest.approx(424.7e6, rel=1e-4)  # field.md E.5


@pytest.mark.parametrize(
    "pixels, tokens, expected", [(512, 64, 15.7e12), (512, 256, 18.6e12), (1024, 64, 69.3e12)]
)
def test_flops_of_a_forward_pass(pixels, tokens, expected):
    """Expected: table E.2 of field.md, three digits."""
    assert published(height=pixels, width=pixels).forward_flops(tokens) == pytest.approx(expected, rel=0.004)


def test_flops_are_what_torch_counts(tiny, transformer):
    """Of the blocks: the layers around them are not in the formula. The counter knows attention only as
    matrix products.
    """
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        transformer(
            hidden_states=torch.zeros(1, 6, 16),
            timestep=torch.zeros(1),
            encoder_hidden_states=torch.zeros(1, 250, 32),
            encoder_hidden_states_mask=torch.ones(1, 250, dtype=torch.bool),
            img_shapes=[[(1, 2, 3)]],
            return_dict=False,
        )
    blocks = counter.get_flop_counts()["QwenImageTransformer2DModel.transformer_blocks.0"]
    assert tiny.layers * sum(blocks.values()) == pytest.approx(tiny.forward_flops(250), rel=1e-3)


def test_flops_of_the_backward_pass():
    """flops.py of shared/reference: the linear part once, attention 2.5 times."""
    shape = published()
    attention = 4 * 60 * 24 * 128 * (1024 + 64) ** 2
    assert shape.attention_flops(64) == attention
    assert shape.lora_backward_flops(64) - shape.forward_flops(64) == pytest.approx(1.5 * attention)
    assert shape.full_backward_flops(64) == pytest.approx(
        2 * (shape.forward_flops(64) - attention) + 2.5 * attention
    )


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"{tmp_path}/vae has no safetensors files"):
        count_parameters(tmp_path / "vae")


@pytest.mark.parametrize("content", [b"", b"\x40\x00\x00\x00\x00\x00\x00\x00{", b"\xff" * 100])
def test_a_torn_file_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="model.safetensors is not a whole safetensors file"):
        count_parameters(tmp_path)


def test_parameters_of_all_files_are_counted(tmp_path):
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(4), "c": torch.zeros(())}, tmp_path / "model-2.safetensors")
    assert count_parameters(tmp_path) == 6 + 4 + 1


def test_a_broken_config_is_named(tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps({"num_layers": 2})[:-1])
    with pytest.raises(ConfigError, match="transformer/config.json cannot be read"):
        QwenImageShape.find(ModelConfig(path=str(tmp_path)))
