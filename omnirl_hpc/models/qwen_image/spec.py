"""The checkpoints that can be trained: Qwen-Image, Qwen-Image-2512 and what was tuned from them."""

from __future__ import annotations

from omnirl_hpc.models.qwen_image.shape import LORA_TARGETS, PIXELS_PER_TOKEN, QwenImageShape, latent_tokens
from omnirl_hpc.models.spec import ANY, ComponentSpec, FamilySpec, Numerics, flow_matching_scheduler

SCHEDULER = flow_matching_scheduler(
    use_dynamic_shifting=(True, False), time_shift_type=("exponential", "linear")
)

TRANSFORMER = ComponentSpec(
    classes=("QwenImageTransformer2DModel",),
    settings={
        "patch_size": (2,),
        "in_channels": ANY,
        "out_channels": ANY,
        "num_layers": ANY,
        "attention_head_dim": ANY,
        "num_attention_heads": ANY,
        "joint_attention_dim": ANY,
        "axes_dims_rope": ANY,
        "pooled_projection_dim": ANY,  # in the published file; no code reads it
        "guidance_embeds": (False,),  # distilled guidance takes its scale as an input, which is not given
        # The forward passes of the pipelines for editing and for layers
        "zero_cond_t": (False,),
        "use_additional_t_cond": (False,),
        "use_layer3d_rope": (False,),
    },
)

SPEC = FamilySpec(
    title="Qwen-Image",
    pipeline_classes=("QwenImagePipeline",),
    components={
        "scheduler": SCHEDULER,
        "transformer": TRANSFORMER,
        "text_encoder": ComponentSpec(classes=("Qwen2_5_VLForConditionalGeneration",)),
        "vae": ComponentSpec(classes=("AutoencoderKLQwenImage",)),
    },
    numerics={engine: Numerics(round_timestep=True) for engine in ("diffusers", "vllm_omni")},
    pixel_multiple=PIXELS_PER_TOKEN,
    max_text_tokens=1024,
    block_classes=("QwenImageTransformerBlock",),
    lora_targets=LORA_TARGETS,
    latent_tokens=latent_tokens,
    shape=QwenImageShape.find,
)
