"""A tiny Qwen-Image with random weights, in the layout on disk of the real one: 2 MB, made in a second, no network.

Everything that runs on Qwen-Image runs on it. Its tokens are bytes, so its prompts are long (the template alone has about
150), and its images are noise: it tests machinery, not quality.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
FIRST_SPECIAL = 256  # ids below are bytes
TEXT_WIDTH = 32
LATENT_CHANNELS = 4

# Qwen/Qwen-Image's scheduler/scheduler_config.json, so that schedules are the real ones.
SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}


def write_tiny_qwen_image(out: str | Path, seed: int = 0) -> None:
    """Write the checkpoint to the folder `out`. The same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = QwenImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
            vae=_vae(),
            text_encoder=_text_encoder(),
            tokenizer=_byte_tokenizer(),
            transformer=_transformer(),
        )
    pipeline.save_pretrained(out)


def _transformer() -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 12, 12),
    ).eval()


def _vae() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        dropout=0.0,
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    ).eval()


def _text_encoder() -> Qwen2_5_VLForConditionalGeneration:
    token = {name: FIRST_SPECIAL + i for i, name in enumerate(SPECIAL_TOKENS)}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 320,
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [2, 3, 3]},
            "rope_theta": 1e6,
            "bos_token_id": token["<|endoftext|>"],
            "eos_token_id": token["<|im_end|>"],
            "pad_token_id": token["<|endoftext|>"],
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
            "patch_size": 14,
            "fullatt_block_indexes": [0],
            "window_size": 28,
        },
        vision_start_token_id=token["<|vision_start|>"],
        vision_end_token_id=token["<|vision_end|>"],
        vision_token_id=token["<|vision_pad|>"],
        image_token_id=token["<|image_pad|>"],
        video_token_id=token["<|video_pad|>"],
        tie_word_embeddings=False,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def _byte_tokenizer() -> Qwen2Tokenizer:
    """Qwen2's byte-level BPE without merges: one token a byte."""
    vocab = {character: i for i, character in enumerate(_byte_characters())}
    vocab |= {name: FIRST_SPECIAL + i for i, name in enumerate(SPECIAL_TOKENS)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    ids = tokenizer("<|im_start|>user")["input_ids"]
    if ids != [FIRST_SPECIAL + 1, *b"user"]:  # a transformers that takes no vocab= ignores it in silence
        raise RuntimeError(f"this transformers made a tokenizer that is not byte-level: {ids}")
    return tokenizer


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE (Radford et al. 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
