"""Glyph: a small Qwen-Image that draws a short word, pretrained by benchmarks/pretrain_glyph.py.

Architecture, layout on disk and scheduler are Qwen-Image's; its images are 64 x 32 pixels, eight latent
tokens. It spells about every second word right, so that there is something to learn. The weights lie beside
this file, in bf16 and as one file (`pack`, `write_glyph`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen2_5_VLForConditionalGeneration

from omnirl_hpc.models.qwen_image.tiny import SCHEDULER, byte_tokenizer, text_encoder

WEIGHTS = Path(__file__).with_name("glyph.safetensors")
# One token each: the words of Qwen-Image's prompt template, which then has 34 tokens before the prompt as the
# real one has, and those of Glyph's own prompts.
WORDS = (
    *("system", "Describe", "user", "assistant", "the"),
    *(" the", " image", " by", " detailing", " color", " shape", " size", " texture", " quantity", " text"),
    *(" spatial", " relationships", " of", " objects", " and", " background", " word", ' "'),
)


@dataclass(frozen=True)
class GlyphSize:
    """The shape of a Glyph. `height` and `width` are those of its images, in pixels."""

    height: int = 32
    width: int = 64
    text_width: int = 64  # of a prompt's embeddings
    heads: int = 3  # of 32 dimensions
    layers: int = 5
    vae_width: int = 16
    vae_multipliers: tuple[int, ...] = (1, 2, 4, 4)
    latent_channels: int = 16


def make_text_encoder(size: GlyphSize, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """It is never trained. Its weights are random, large enough for attention to mix what came before into
    every token, and rounded to bf16. A linear map reads letters and their places from its embeddings.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = text_encoder(size.text_width, heads=2, vocabulary=len(byte_tokenizer(WORDS)))().eval()
        for name, parameter in module.named_parameters():
            if name.endswith("embed_tokens.weight"):
                nn.init.normal_(parameter)
            elif "language_model" in name and name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return module.to(torch.bfloat16).float().requires_grad_(False)


def make_vae(
    size: GlyphSize, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> AutoencoderKLQwenImage:
    """With random weights. `mean` and `std` [latent_channels] are those of its latents."""
    vae = AutoencoderKLQwenImage(
        base_dim=size.vae_width,
        z_dim=size.latent_channels,
        dim_mult=list(size.vae_multipliers),
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        latents_mean=list(mean or [0.0] * size.latent_channels),
        latents_std=list(std or [1.0] * size.latent_channels),
    )
    with torch.no_grad():
        for conv in frame_convolutions(vae).values():
            conv.weight[:, :, :-1] = 0
    return vae


def make_transformer(size: GlyphSize) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * size.latent_channels,
        out_channels=size.latent_channels,
        num_layers=size.layers,
        attention_head_dim=32,
        num_attention_heads=size.heads,
        joint_attention_dim=size.text_width,
        axes_dims_rope=(8, 12, 12),
    )


def frame_convolutions(vae: nn.Module) -> dict[str, QwenImageCausalConv3d]:
    """The causal convolutions over time by name. Of their weights, a picture, a single frame, meets the last
    frame's alone: those of frames before the first are zero in a Glyph.
    """
    return {
        name: module
        for name, module in vae.named_modules()
        if isinstance(module, QwenImageCausalConv3d) and module.kernel_size[0] > 1
    }


def pack(
    path: Path,
    size: GlyphSize,
    encoder: nn.Module,
    vae: AutoencoderKLQwenImage,
    transformer: nn.Module,
    facts: Mapping[str, Any],
) -> None:
    """Write the three modules as one file in bf16, without frames that are zero. `facts`: how it was made."""
    state: dict[str, Tensor] = {}
    frames = {f"{name}.weight" for name in frame_convolutions(vae)}
    for part, module in (("text_encoder", encoder), ("vae", vae), ("transformer", transformer)):
        for name, tensor in module.state_dict().items():
            if part == "vae" and name in frames:
                tensor = tensor[:, :, -1:]
            state[f"{part}.{name}"] = tensor.to("cpu", torch.bfloat16).contiguous()
    latents = {"mean": vae.config.latents_mean, "std": vae.config.latents_std}
    metadata = {"size": asdict(size), "latents": latents, "facts": dict(facts)}
    save_file(state, path, {name: json.dumps(value) for name, value in metadata.items()})


def load_glyph(path: Path = WEIGHTS, dtype: torch.dtype = torch.float32) -> QwenImagePipeline:
    """The pipeline that `pack` wrote."""
    with safe_open(path, framework="pt") as file:
        metadata = {name: json.loads(value) for name, value in file.metadata().items()}
        state = {name: file.get_tensor(name).float() for name in file.keys()}
    size = GlyphSize(**metadata["size"])
    latents = metadata["latents"]
    parts = {
        "text_encoder": make_text_encoder(size, seed=0),
        "vae": make_vae(size, latents["mean"], latents["std"]),
        "transformer": make_transformer(size),
    }
    for part, module in parts.items():
        own = {
            name.removeprefix(f"{part}."): tensor
            for name, tensor in state.items()
            if name.startswith(f"{part}.")
        }
        if part == "vae":
            for name, conv in frame_convolutions(module).items():
                whole = torch.zeros_like(conv.weight)
                whole[:, :, -1:] = own[f"{name}.weight"]
                own[f"{name}.weight"] = whole
        module.load_state_dict(own)
        nn.Module.to(module.eval(), dtype)  # diffusers' own `to` warns of every cast
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER), tokenizer=byte_tokenizer(WORDS), **parts
    )


def write_glyph(out: str | Path, path: Path = WEIGHTS) -> None:
    """Write the checkpoint to the folder `out` in diffusers' layout, in bf16."""
    load_glyph(path, torch.bfloat16).save_pretrained(out)
