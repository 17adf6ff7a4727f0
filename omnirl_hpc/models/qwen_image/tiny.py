"""A tiny Qwen-Image with random weights, in the layout on disk of the real one: 2 MB, made in a second, no
network.

Everything that runs on Qwen-Image runs on it. Its tokens are bytes, so its prompts are long (the template
alone has about 150), and its images are noise: it tests machinery, not quality.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from omnirl_hpc.models.qwen_image.shape import PUBLISHED

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
TINY_TEXT_WIDTH = 32
TINY_LATENT_CHANNELS = 4

Part = Callable[[], torch.nn.Module]

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


def write_tiny(out: str | Path, seed: int = 0) -> None:
    """Write the checkpoint to the folder `out`, in fp32. The same seed gives the same weights."""
    _write(
        out, seed, _tiny_transformer, _tiny_vae, text_encoder(width=TINY_TEXT_WIDTH, heads=2), torch.float32
    )


def write_full_size(out: str | Path, seed: int = 0) -> None:
    """The same with Qwen-Image's own transformer (20.4 B parameters) and VAE in bf16, 41 GB, for measuring
    speed and memory.

    The text encoder stays tiny but for its width. Weights are drawn on the GPU where there is one.
    """
    _write(
        out,
        seed,
        _full_transformer,
        AutoencoderKLQwenImage,
        text_encoder(width=PUBLISHED["joint_attention_dim"], heads=28),
        torch.bfloat16,
    )


def _write(
    out: str | Path, seed: int, transformer: Part, vae: Part, text_encoder: Part, dtype: torch.dtype
) -> None:
    def made(part: Part) -> torch.nn.Module:
        module = part()
        return (module if module.dtype == dtype else module.to(dtype)).eval()  # diffusers warns of every cast

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = QwenImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
            vae=made(vae),
            text_encoder=made(text_encoder),
            tokenizer=byte_tokenizer(),
            transformer=made(transformer),
        )
    pipeline.save_pretrained(out)


def _tiny_transformer() -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * TINY_LATENT_CHANNELS,
        out_channels=TINY_LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=TINY_TEXT_WIDTH,
        axes_dims_rope=(8, 12, 12),
    )


def _full_transformer() -> QwenImageTransformer2DModel:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel(**PUBLISHED).to(torch.bfloat16)
    transformer = transformer.to_empty(device=device)
    for name, parameter in transformer.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
        else:
            torch.nn.init.constant_(parameter, 1.0 if "norm" in name else 0.0)
    return transformer


def _tiny_vae() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=TINY_LATENT_CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        dropout=0.0,
        latents_mean=[0.0] * TINY_LATENT_CHANNELS,
        latents_std=[1.0] * TINY_LATENT_CHANNELS,
    )


def text_encoder(width: int, heads: int, vocabulary: int = 320) -> Part:
    """A Qwen2.5-VL of two layers with embeddings of `width`."""
    token = {name: FIRST_SPECIAL + i for i, name in enumerate(SPECIAL_TOKENS)}
    eighth = (
        width // heads // 8
    )  # of a head: its rotary dimensions are shared 1 : 1.5 : 1.5 by time, height and width, in pairs
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "type": "default",
                "rope_type": "default",
                "mrope_section": [eighth, 3 * eighth // 2, 3 * eighth // 2],
            },
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
            "out_hidden_size": width,
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
    return lambda: Qwen2_5_VLForConditionalGeneration(config)


def byte_tokenizer(words: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Qwen2's byte-level BPE with one token for each of `words` (a leading space belongs to a word), and for
    everything else one token a byte.
    """
    characters = _byte_characters()
    vocab = {character: i for i, character in enumerate(characters)}
    vocab |= {name: FIRST_SPECIAL + i for i, name in enumerate(SPECIAL_TOKENS)}
    merges = []
    # A word grows from its first letter on. Words with a leading space come first: what the merges of the
    # others join inside of them would stop their growth.
    for word in sorted(words, key=lambda word: not word.startswith(" ")):
        letters = [characters[byte] for byte in word.encode()]
        for end in range(1, len(letters)):
            grown = "".join(letters[: end + 1])
            if grown not in vocab:
                vocab[grown] = len(vocab)
                merges.append(("".join(letters[:end]), letters[end]))
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    ids = tokenizer("<|im_start|>WORD")["input_ids"]
    if ids != [FIRST_SPECIAL + 1, *b"WORD"]:  # a transformers that takes no vocab= ignores it in silence
        raise RuntimeError(f"this transformers made a tokenizer that is not byte-level: {ids}")
    return tokenizer


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE (Radford et al. 2019)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
