"""The checkpoints that can be trained: Stable Diffusion 3.5 medium and large, and what was tuned from
them.
"""

from __future__ import annotations

from omnirl_hpc.models.spec import ANY, ComponentSpec, FamilySpec, Numerics, flow_matching_scheduler
from omnirl_hpc.models.stable_diffusion_3.shape import (
    LORA_TARGETS,
    PATCH,
    PIXELS_PER_CELL,
    T5_TOKENS,
    TEXT_WIDTH,
    StableDiffusion3Shape,
    latent_tokens,
)

# The schedule is that of the scheduler's own steps
SCHEDULER = flow_matching_scheduler(use_dynamic_shifting=(False,))

TRANSFORMER = ComponentSpec(
    classes=("SD3Transformer2DModel",),
    settings={
        "sample_size": ANY,
        "patch_size": (2,),
        "in_channels": ANY,
        "num_layers": ANY,
        "attention_head_dim": ANY,
        "num_attention_heads": ANY,
        "joint_attention_dim": ANY,
        "caption_projection_dim": ANY,
        "pooled_projection_dim": ANY,
        "out_channels": ANY,
        "pos_embed_max_size": ANY,
        "dual_attention_layers": ANY,
        "qk_norm": ("rms_norm", None),
    },
)

SPEC = FamilySpec(
    title="Stable Diffusion 3.5",
    pipeline_classes=("StableDiffusion3Pipeline",),
    components={
        "scheduler": SCHEDULER,
        "transformer": TRANSFORMER,
        "text_encoder": ComponentSpec(classes=("CLIPTextModelWithProjection",)),
        "text_encoder_2": ComponentSpec(classes=("CLIPTextModelWithProjection",)),
        "text_encoder_3": ComponentSpec(classes=("T5EncoderModel",)),
        "vae": ComponentSpec(classes=("AutoencoderKL",)),
    },
    numerics={
        "diffusers": Numerics(batched_cfg=True, round_timestep=False),
        "vllm_omni": Numerics(batched_cfg=False, round_timestep=True),
    },
    pixel_multiple=PATCH * PIXELS_PER_CELL,
    max_text_tokens=T5_TOKENS,
    tokenizer="tokenizer_3",  # of T5
    text_width=TEXT_WIDTH,
    block_classes=("JointTransformerBlock",),
    lora_targets=LORA_TARGETS,
    latent_tokens=latent_tokens,
    shape=StableDiffusion3Shape.find,
)
