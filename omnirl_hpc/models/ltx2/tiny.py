"""A tiny LTX-2.3 with random weights, in the layout on disk of the real one: 4 MB, no network."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2VocoderWithBWE
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, GemmaTokenizer

VIDEO_WIDTH, AUDIO_WIDTH, TEXT_WIDTH, TEXT_LAYERS = 48, 24, 24, 2
VIDEO_CHANNELS, MEL_BINS, SOUND_CHANNELS = 8, 16, 4
CHARACTERS = ["▁", *(chr(code) for code in range(ord("!"), ord("~") + 1))]
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]

SCHEDULER = {
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "shift_terminal": 0.1,
    "use_dynamic_shifting": True,
}


def write_tiny(out: str | Path, seed: int = 0) -> None:
    """Write the checkpoint to the folder `out`, in fp32. The same seed gives the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = LTX2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
            vae=_video_vae().eval(),
            audio_vae=_audio_vae().eval(),
            text_encoder=_text_encoder().eval(),
            tokenizer=_tokenizer(),
            connectors=_connectors().eval(),
            transformer=_transformer().eval(),
            vocoder=_vocoder().eval(),
        )
    pipeline.save_pretrained(out)


def _transformer() -> LTX2VideoTransformer3DModel:
    return LTX2VideoTransformer3DModel(
        in_channels=VIDEO_CHANNELS,
        out_channels=VIDEO_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=VIDEO_WIDTH // 2,
        cross_attention_dim=VIDEO_WIDTH,
        audio_in_channels=MEL_BINS,
        audio_out_channels=MEL_BINS,
        audio_num_attention_heads=2,
        audio_attention_head_dim=AUDIO_WIDTH // 2,
        audio_cross_attention_dim=AUDIO_WIDTH,
        num_layers=2,
        use_prompt_embeddings=False,
        gated_attn=True,
        cross_attn_mod=True,
        audio_gated_attn=True,
        audio_cross_attn_mod=True,
        perturbed_attn=True,
        rope_type="split",
    )


def _connectors() -> LTX2TextConnectors:
    return LTX2TextConnectors(
        caption_channels=TEXT_WIDTH,
        text_proj_in_factor=TEXT_LAYERS + 1,  # the embeddings count as a layer
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=VIDEO_WIDTH // 2,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=16,
        video_gated_attn=True,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=AUDIO_WIDTH // 2,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=16,
        audio_gated_attn=True,
        rope_type="split",
        per_modality_projections=True,
        video_hidden_dim=VIDEO_WIDTH,
        audio_hidden_dim=AUDIO_WIDTH,
        proj_bias=True,
    )


def _text_encoder() -> Gemma3ForConditionalGeneration:
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config={
                "vocab_size": len(SPECIAL) + len(CHARACTERS) + 4,
                "hidden_size": TEXT_WIDTH,
                "intermediate_size": 2 * TEXT_WIDTH,
                "num_hidden_layers": TEXT_LAYERS,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 12,
                "max_position_embeddings": 2048,
                "pad_token_id": 0,
                "eos_token_id": 1,
                "bos_token_id": 2,
            },
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 8,
            },
            mm_tokens_per_image=4,
            boi_token_index=len(SPECIAL) + len(CHARACTERS),
            eoi_token_index=len(SPECIAL) + len(CHARACTERS) + 1,
            image_token_index=len(SPECIAL) + len(CHARACTERS) + 2,
        )
    )


def _tokenizer() -> GemmaTokenizer:
    """One token a character, spaces too, and one at the start."""
    vocab = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    return GemmaTokenizer(vocab=vocab, merges=[], model_max_length=1024, add_bos_token=True)


def _video_vae() -> AutoencoderKLLTX2Video:
    """As the real one: 32 pixels and 8 frames a cell."""
    return AutoencoderKLLTX2Video(
        latent_channels=VIDEO_CHANNELS,
        block_out_channels=(8, 16, 32, 32),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )


def _audio_vae() -> AutoencoderKLLTX2Audio:
    return AutoencoderKLLTX2Audio(
        base_channels=MEL_BINS,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        latent_channels=SOUND_CHANNELS,
        resolution=MEL_BINS,
        mel_bins=MEL_BINS,
    )


def _vocoder() -> LTX2VocoderWithBWE:
    """16 kHz from a spectrogram of 100 frames a second, extended to 48 kHz."""
    small = {"resnet_kernel_sizes": [3], "resnet_dilations": [[1]]}
    return LTX2VocoderWithBWE(
        in_channels=2 * MEL_BINS,
        hidden_channels=32,
        upsample_kernel_sizes=[20, 16],
        upsample_factors=[10, 16],
        bwe_in_channels=2 * MEL_BINS,
        bwe_hidden_channels=32,
        bwe_upsample_kernel_sizes=[24, 20],
        bwe_upsample_factors=[12, 20],
        num_mel_channels=MEL_BINS,
        filter_length=128,
        window_length=128,
        **small,
        **{f"bwe_{name}": value for name, value in small.items()},
    )
