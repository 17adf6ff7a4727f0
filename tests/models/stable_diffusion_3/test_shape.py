"""The shape of Stable Diffusion 3.5 is that of its models. Expected values: the models."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from omnirl_hpc.config.schema import LoraConfig, ModelConfig
from omnirl_hpc.models.lora import add_lora, lora_parameters
from omnirl_hpc.models.stable_diffusion_3.family import StableDiffusion3
from omnirl_hpc.models.stable_diffusion_3.shape import (
    LORA_TARGETS,
    PUBLISHED,
    PUBLISHED_PARTS,
    StableDiffusion3Shape,
)

# The configurations of the parts of stabilityai/stable-diffusion-3.5-medium, as far as they decide parameters
CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "projection_dim": 768}
CLIP_G = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "projection_dim": 1280}
T5_XXL = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 32128}
VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.fixture(scope="module")
def tiny(tiny_sd3) -> StableDiffusion3Shape:
    return StableDiffusion3Shape.find(ModelConfig(path=str(tiny_sd3), height=32, width=48))


@pytest.fixture
def transformer(tiny_sd3) -> nn.Module:
    return StableDiffusion3(ModelConfig(path=str(tiny_sd3))).load_transformer(torch.float32)


def test_published_parts():
    with torch.device("meta"):
        made = {
            "text_encoder": CLIPTextModelWithProjection(CLIPTextConfig(**CLIP_L)),
            "text_encoder_2": CLIPTextModelWithProjection(CLIPTextConfig(num_attention_heads=20, **CLIP_G)),
            "text_encoder_3": T5EncoderModel(T5Config(feed_forward_proj="gated-gelu", **T5_XXL)),
            "vae": AutoencoderKL(**VAE),
        }
        transformer = SD3Transformer2DModel(**PUBLISHED)
    assert {name: size(module) for name, module in made.items()} == PUBLISHED_PARTS
    shape = StableDiffusion3Shape.find(ModelConfig(path="-"))
    assert shape.transformer_parameters == size(transformer) == 2_243_171_520
    assert shape.latent_tokens == 1024 and shape.latent_values == 16 * 64 * 64


def test_parts_of_a_checkpoint(tiny, tiny_sd3, transformer):
    pipeline = StableDiffusion3(ModelConfig(path=str(tiny_sd3))).load_pipeline(torch.float32)
    assert tiny.transformer_parameters == size(transformer)
    assert tiny.other_parameters == {name: size(getattr(pipeline, name)) for name in PUBLISHED_PARTS}
    assert tiny.block_parameters == max(map(size, transformer.transformer_blocks))
    norms = [n for block in transformer.transformer_blocks for n in (block.norm1, block.norm1_context)]
    assert tiny.modulation_parameters == sum(map(size, norms))


@pytest.mark.parametrize("targets", [None, ["to_q", "to_out.0"], ["ff_context.net.2"]])
def test_lora_is_what_peft_makes(tiny, transformer, targets):
    add_lora(transformer, LoraConfig(rank=4), targets or LORA_TARGETS, torch.float32, seed=0)
    made = lora_parameters(transformer)
    assert tiny.lora_parameters(4, targets) == sum(parameter.numel() for parameter in made.values())
    assert tiny.lora_layers(targets) * tiny.layers == pytest.approx(len(made) / 2)


def test_flops_are_what_torch_counts(tiny, transformer):
    """Of the blocks: the layers around them are not in the formula."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        transformer(
            hidden_states=torch.zeros(1, 16, 4, 6),
            timestep=torch.zeros(1),
            encoder_hidden_states=torch.zeros(1, 333, 32),
            pooled_projections=torch.zeros(1, 32),
            return_dict=False,
        )
    counts = counter.get_flop_counts()
    blocks = [counts[f"SD3Transformer2DModel.transformer_blocks.{i}"] for i in range(3)]
    assert sum(sum(block.values()) for block in blocks) == pytest.approx(tiny.forward_flops(333), rel=1e-3)
