"""See tests.models.families.Facts."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from omnirl_hpc.sampling.samples import Media
from omnirl_hpc.sampling.streams import LATENTS
from tests.models.families import Facts, StockCall

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


def stock(pipeline: Any, call: StockCall) -> Media:
    images = pipeline(
        prompt=call.prompt,
        negative_prompt=call.negative,
        guidance_scale=call.scale,
        height=call.model.height,
        width=call.model.width,
        latents=call.latents[LATENTS],
        num_inference_steps=call.steps,
        output_type="np",
    ).images
    return Media(torch.from_numpy((images * 255).round().astype("uint8")).permute(0, 3, 1, 2)[:, None])


def published_parts() -> dict[str, nn.Module]:
    return {
        "text_encoder": CLIPTextModelWithProjection(CLIPTextConfig(**CLIP_L)),
        "text_encoder_2": CLIPTextModelWithProjection(CLIPTextConfig(num_attention_heads=20, **CLIP_G)),
        "text_encoder_3": T5EncoderModel(T5Config(feed_forward_proj="gated-gelu", **T5_XXL)),
        "vae": AutoencoderKL(**VAE),
    }


FACTS = Facts(
    size={"height": 32, "width": 48},
    streams={LATENTS: (16, 4, 6)},  # cells of 8 x 8 pixels
    stock=stock,
    published_parts=published_parts,
    transformer_parameters=2_243_171_520,
    modulation="norm1",
    # 8 targets in each of 3 blocks, 4 more in 2 of them, and no text to hand on in the last one
    adapted=31,
    unread=("transformer_blocks.2.attn.add_q_proj",),
)
