"""The checkpoints that can be trained: LTX-2.3 and what was tuned from it."""

from __future__ import annotations

from omnirl_hpc.models.ltx2.shape import (
    FRAMES_PER_CELL,
    LORA_TARGETS,
    PIXELS_PER_CELL,
    TEXT_WIDTH,
    Ltx2Shape,
    latent_tokens,
)
from omnirl_hpc.models.spec import ANY, ComponentSpec, FamilySpec, Numerics, flow_matching_scheduler

# 2.0 differs in the first five, later versions in the others
FLAGS = {
    "gated_attn": True,
    "cross_attn_mod": True,
    "audio_gated_attn": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "ff_bias": True,
    "audio_ff_bias": True,
    "attention_bias": True,
    "attention_out_bias": True,
    "use_prompt_adaln_single": True,
    "use_keyframes_abs_pos_embedding": False,
    "norm_elementwise_affine": False,
    "patch_size": 1,
    "patch_size_t": 1,
    "audio_patch_size": 1,
    "audio_patch_size_t": 1,
}
FREE = (
    "in_channels",
    "out_channels",
    "num_attention_heads",
    "attention_head_dim",
    "cross_attention_dim",
    "vae_scale_factors",
    "pos_embed_max_pos",
    "base_height",
    "base_width",
    "audio_in_channels",
    "audio_out_channels",
    "audio_num_attention_heads",
    "audio_attention_head_dim",
    "audio_cross_attention_dim",
    "audio_scale_factor",
    "audio_pos_embed_max_pos",
    "audio_sampling_rate",
    "audio_hop_length",
    "num_layers",
    "activation_fn",
    "qk_norm",
    "norm_eps",
    "caption_channels",
    "rope_theta",
    "rope_double_precision",
    "causal_offset",
    "timestep_scale_multiplier",
    "cross_attn_timestep_scale_multiplier",
    "rope_type",
    "perturbed_attn",
)

TRANSFORMER = ComponentSpec(
    classes=("LTX2VideoTransformer3DModel",),
    settings={**{name: (value,) for name, value in FLAGS.items()}, **dict.fromkeys(FREE, ANY)},
)

SPEC = FamilySpec(
    title="LTX-2.3",
    pipeline_classes=("LTX2Pipeline",),
    components={
        "scheduler": flow_matching_scheduler(
            use_dynamic_shifting=(True, False), time_shift_type=("exponential", "linear")
        ),
        "transformer": TRANSFORMER,
        "text_encoder": ComponentSpec(classes=("Gemma3ForConditionalGeneration",)),
        "connectors": ComponentSpec(classes=("LTX2TextConnectors",)),
        "vae": ComponentSpec(classes=("AutoencoderKLLTX2Video",)),
        "audio_vae": ComponentSpec(classes=("AutoencoderKLLTX2Audio",)),
        "vocoder": ComponentSpec(classes=("LTX2VocoderWithBWE",)),  # 2.0 has another one
    },
    numerics={engine: Numerics() for engine in ("diffusers", "vllm_omni")},
    engine_parallel=(),  # the loop of our own runs on one rank
    pixel_multiple=PIXELS_PER_CELL,
    frame_step=FRAMES_PER_CELL,
    max_text_tokens=TEXT_WIDTH,
    text_width=TEXT_WIDTH,
    block_classes=("LTX2VideoTransformerBlock",),
    lora_targets=LORA_TARGETS,
    latent_tokens=latent_tokens,
    shape=Ltx2Shape.find,
    makes=("video", "audio"),
)
