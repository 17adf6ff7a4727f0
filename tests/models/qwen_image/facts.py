"""See tests.models.families.Facts."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from omnirl_hpc.sampling.samples import Media
from omnirl_hpc.sampling.streams import LATENTS
from tests.models.families import Facts, StockCall

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


def stock(pipeline: Any, call: StockCall) -> Media:
    images = pipeline(
        prompt=call.prompt,
        negative_prompt=call.negative,
        true_cfg_scale=call.scale,
        height=call.model.height,
        width=call.model.width,
        latents=call.latents[LATENTS],
        num_inference_steps=call.steps,
        output_type="np",
    ).images
    return Media(torch.from_numpy((images * 255).round().astype("uint8")).permute(0, 3, 1, 2)[:, None])


def published_parts() -> dict[str, nn.Module]:
    config = Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False)
    return {"text_encoder": Qwen2_5_VLForConditionalGeneration(config), "vae": AutoencoderKLQwenImage()}


FACTS = Facts(
    size={"height": 32, "width": 48},
    streams={LATENTS: (6, 16)},  # 2 x 3 tokens of 16 x 16 pixels; 4 latent channels x (2 x 2) cells
    stock=stock,
    published_parts=published_parts,
    transformer_parameters=20_430_401_088,
    modulation="_mod.",
    adapted=24,  # 12 targets in each of 2 blocks
    unread=(
        "transformer_blocks.1.attn.add_q_proj",
        "transformer_blocks.1.attn.to_add_out",
        "transformer_blocks.1.txt_mlp.net.0.proj",
        "transformer_blocks.1.txt_mlp.net.2",
    ),
)
