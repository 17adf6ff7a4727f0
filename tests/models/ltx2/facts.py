"""See tests.models.families.Facts."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2VocoderWithBWE
from torch import nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from omnirl_hpc.sampling.samples import Media
from tests.models.families import Facts, StockCall

# google/gemma-3-12b-it's config.json, as far as it decides the number of parameters
TEXT = {
    "vocab_size": 262208,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
}
VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "vision_use_head": False,
    "patch_size": 14,
}
# What diffusers' script scripts/convert_ltx2_to_diffusers.py writes for Lightricks/LTX-2.3, where it differs
# from the classes' defaults; the VAE of sound and the vocoder do not
CONNECTORS = {
    "video_connector_num_attention_heads": 32,
    "video_connector_num_layers": 8,
    "video_gated_attn": True,
    "audio_connector_num_attention_heads": 32,
    "audio_connector_attention_head_dim": 64,
    "audio_connector_num_layers": 8,
    "audio_gated_attn": True,
    "rope_type": "split",
    "per_modality_projections": True,
    "proj_bias": True,
}
VAE = {
    "block_out_channels": (256, 512, 1024, 1024),
    "decoder_block_out_channels": (256, 512, 512, 1024),
    "layers_per_block": (4, 6, 4, 2, 2),
    "decoder_layers_per_block": (4, 6, 4, 2, 2),
    "decoder_spatio_temporal_scaling": (True,) * 4,
    "decoder_inject_noise": (False,) * 5,
    "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
    "upsample_residual": (False,) * 4,
    "upsample_factor": (2, 2, 1, 2),
}
# Guidance without what the stock pipeline adds to it
PLAIN = {
    f"{prefix}{name}": value
    for prefix in ("", "audio_")
    for name, value in (("stg_scale", 0.0), ("modality_scale", 1.0), ("guidance_rescale", 0.0))
}


def stock(pipeline: Any, call: StockCall) -> Media:
    made = pipeline(
        call.prompt,
        negative_prompt=call.negative,
        height=call.model.height,
        width=call.model.width,
        num_frames=call.model.frames,
        frame_rate=call.model.fps,
        num_inference_steps=call.steps,
        guidance_scale=call.scale,
        audio_guidance_scale=call.scale,
        latents=call.latents["video"],
        audio_latents=call.latents["audio"],
        use_cross_timestep=True,
        output_type="pt",
        **PLAIN,
    )
    return Media((made.frames * 255).round().byte(), made.audio.float(), call.model.fps, 48000)


def published_parts() -> dict[str, nn.Module]:
    return {
        "text_encoder": Gemma3ForConditionalGeneration(Gemma3Config(text_config=TEXT, vision_config=VISION)),
        "connectors": LTX2TextConnectors(**CONNECTORS),
        "vae": AutoencoderKLLTX2Video(**VAE),
        "audio_vae": AutoencoderKLLTX2Audio(),
        "vocoder": LTX2VocoderWithBWE(),
    }


FACTS = Facts(
    size={"height": 64, "width": 96, "frames": 9},
    # 9 frames are 2 of latents, 64 x 96 pixels 2 x 3 cells; 9 / 24 s of sound at 25 latents a second
    streams={"video": (12, 8), "audio": (9, 16)},
    stock=stock,
    published_parts=published_parts,
    transformer_parameters=18_988_838_144,
    modulation="scale_shift_table",
    adapted=56,  # 28 targets in each of 2 blocks
    unread=(),
    engine_gap=1e-6,
    rewards=("video_compressibility", "loudness"),
)
