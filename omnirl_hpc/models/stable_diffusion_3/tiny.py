"""A tiny Stable Diffusion 3.5 with random weights, in the layout on disk of the real one: 1 MB, no
network.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

PRINTABLE = [chr(code) for code in range(ord("!"), ord("~") + 1)]
CLIP_SPECIAL = ("<|startoftext|>", "<|endoftext|>")
TEXT_CHANNELS, CLIP_CHANNELS = 32, 16


def write_tiny(out: str | Path, seed: int = 0) -> None:
    """Write the checkpoint to the folder `out`, in fp32. The same seed gives the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = StableDiffusion3Pipeline(
            transformer=_transformer().eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_vae().eval(),
            text_encoder=_clip().eval(),
            tokenizer=_clip_tokenizer(),
            text_encoder_2=_clip().eval(),
            tokenizer_2=_clip_tokenizer(),
            text_encoder_3=_t5().eval(),
            tokenizer_3=_t5_tokenizer(),
        )
    pipeline.save_pretrained(out)


def _transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=16,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_CHANNELS,
        caption_projection_dim=32,
        pooled_projection_dim=2 * CLIP_CHANNELS,
        pos_embed_max_size=32,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )


def _vae() -> AutoencoderKL:
    """As the real one, 8 pixels a cell."""
    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=16,
        norm_num_groups=4,
        layers_per_block=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5305,
        shift_factor=0.0609,
    )


def _clip() -> CLIPTextModelWithProjection:
    size = 2 * len(PRINTABLE) + len(CLIP_SPECIAL)
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=size,
            hidden_size=CLIP_CHANNELS,
            intermediate_size=2 * CLIP_CHANNELS,
            projection_dim=CLIP_CHANNELS,
            num_hidden_layers=2,
            num_attention_heads=2,
            bos_token_id=size - 2,
            eos_token_id=size - 1,
            pad_token_id=size - 1,
        )
    )


def _clip_tokenizer() -> CLIPTokenizer:
    """CLIP's BPE without merges: one token a character; the last one of a word has an ending of its own."""
    tokens = [*PRINTABLE, *(character + "</w>" for character in PRINTABLE), *CLIP_SPECIAL]
    vocab = {token: number for number, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def _t5() -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=4 + len(PRINTABLE),
            d_model=TEXT_CHANNELS,
            d_kv=16,
            d_ff=2 * TEXT_CHANNELS,
            num_layers=2,
            num_heads=2,
            feed_forward_proj="gated-gelu",
        )
    )


def _t5_tokenizer() -> T5Tokenizer:
    """SentencePiece's unigram model with a piece for each character: one token a character, spaces too."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *PRINTABLE]
    return T5Tokenizer(vocab=[(piece, 0.0 if piece[0] == "<" else -2.0) for piece in pieces], extra_ids=0)
