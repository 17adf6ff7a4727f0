"""The shape of Qwen-Image's parts: parameters, FLOPs, widths. The arithmetic of shared formulas, without the
model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omnirl_hpc.config.schema import ModelConfig
from omnirl_hpc.errors import ConfigError

# Qwen/Qwen-Image's transformer/config.json, and the parameters of its other parts (Qwen2.5-VL-7B and the
# VAE).
PUBLISHED = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "axes_dims_rope": (16, 56, 56),
}
PUBLISHED_TEXT_ENCODER = 8_292_166_656
PUBLISHED_VAE = 126_892_531

PIXELS_PER_TOKEN = 16  # each way
TIMESTEP_CHANNELS = 256
# The 12 targets of the published recipes: attention and MLP of both streams. Timestep modulation stays
# frozen.
LORA_TARGETS = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
)


@dataclass(frozen=True)
class QwenImageShape:
    """Of a checkpoint where there is one, else of the published model."""

    source: str
    layers: int
    heads: int
    head_dim: int
    in_channels: int  # of a token's latents
    out_channels: int  # of a latent cell
    text_width: int  # of the prompt's embeddings
    text_encoder_parameters: int
    vae_parameters: int
    image_tokens: int  # of one image

    @classmethod
    def find(cls, model: ModelConfig) -> QwenImageShape:
        """Raises ConfigError where the checkpoint's files cannot be read."""
        folder = Path(model.path)
        there = (folder / "transformer" / "config.json").is_file()
        config = PUBLISHED | _read_json(folder / "transformer" / "config.json") if there else PUBLISHED
        return cls(
            source=f"the files in {folder}" if there else "Qwen/Qwen-Image as published",
            layers=config["num_layers"],
            heads=config["num_attention_heads"],
            head_dim=config["attention_head_dim"],
            in_channels=config["in_channels"],
            out_channels=config["out_channels"],
            text_width=config["joint_attention_dim"],
            text_encoder_parameters=count_parameters(folder / "text_encoder")
            if there
            else PUBLISHED_TEXT_ENCODER,
            vae_parameters=count_parameters(folder / "vae") if there else PUBLISHED_VAE,
            image_tokens=(model.height // PIXELS_PER_TOKEN) * (model.width // PIXELS_PER_TOKEN),
        )

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def block_linears(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one block: name -> (in, out)."""
        d = self.width
        attention = (
            "to_q",
            "to_k",
            "to_v",
            "to_out.0",
            "add_q_proj",
            "add_k_proj",
            "add_v_proj",
            "to_add_out",
        )
        linears = {f"attn.{name}": (d, d) for name in attention}
        for stream in ("img", "txt"):
            linears |= {
                f"{stream}_mod.1": (d, 6 * d),
                f"{stream}_mlp.net.0.proj": (d, 4 * d),
                f"{stream}_mlp.net.2": (4 * d, d),
            }
        return linears

    @property
    def block_parameters(self) -> int:
        norms = 4 * self.head_dim  # of queries and keys, of both streams
        return sum(i * o + o for i, o in self.block_linears.values()) + norms

    @property
    def modulation_parameters(self) -> int:
        """Of all blocks: engines do not split them over the ranks of a replica."""
        d = self.width
        return self.layers * 2 * (d * 6 * d + 6 * d)

    @property
    def transformer_parameters(self) -> int:
        d, patch = self.width, PUBLISHED["patch_size"] ** 2
        ends = [
            (self.in_channels, d),
            (self.text_width, d),
            (TIMESTEP_CHANNELS, d),
            (d, d),
            (d, 2 * d),
            (d, patch * self.out_channels),
        ]
        return self.layers * self.block_parameters + sum(i * o + o for i, o in ends) + self.text_width

    def lora_parameters(self, rank: int, targets: Sequence[str] | None) -> int:
        """Of an adapter on `targets` (None: the published ones) in every block."""
        return self.layers * rank * sum(i + o for i, o in self._adapted(targets))

    def lora_layers(self, targets: Sequence[str] | None) -> int:
        """Adapted linear layers of one block."""
        return len(self._adapted(targets))

    def _adapted(self, targets: Sequence[str] | None) -> list[tuple[int, int]]:
        ends = tuple("." + target for target in targets or LORA_TARGETS)
        return [size for name, size in self.block_linears.items() if f".{name}".endswith(ends)]

    def forward_flops(self, text_tokens: int) -> float:
        """Floating-point operations of one forward pass of the transformer on one image.

        Two streams of 12 d^2 multiply-adds a token and layer, modulation once a layer, and attention over
        both.
        """
        d, tokens = self.width, self.image_tokens + text_tokens
        return self.layers * (24 * d**2 * tokens + 24 * d**2) + self.attention_flops(text_tokens)

    def attention_flops(self, text_tokens: int) -> float:
        """The part of `forward_flops` that is the product of queries and keys and that of weights and
        values.
        """
        return self.layers * 4 * self.width * (self.image_tokens + text_tokens) ** 2

    def lora_backward_flops(self, text_tokens: int) -> float:
        """Of the backward pass where only LoRA is trained: gradients of inputs, not of weights; attention
        with its scores.
        """
        attention = self.attention_flops(text_tokens)
        return self.forward_flops(text_tokens) - attention + 2.5 * attention

    def full_backward_flops(self, text_tokens: int) -> float:
        """The same where all weights are trained: gradients of weights, too, which are as much again but for
        attention.
        """
        return (
            self.lora_backward_flops(text_tokens)
            + self.forward_flops(text_tokens)
            - self.attention_flops(text_tokens)
        )


@cache
def count_parameters(folder: Path) -> int:
    """Of the safetensors files in a folder, from their headers alone."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no safetensors files: the checkpoint is not complete")
    return sum(
        math.prod(tensor["shape"])
        for file in files
        for name, tensor in _header(file).items()
        if name != "__metadata__"
    )


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"{file} is not a whole safetensors file: {error}") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
