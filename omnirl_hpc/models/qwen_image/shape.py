"""The shape of Qwen-Image's parts: parameters, FLOPs, widths. The arithmetic of shared formulas, without the
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omnirl_hpc.config.schema import ModelConfig
from omnirl_hpc.models.shape import JOINT_ATTENTION, ModelShape, count_linears, describe

# Qwen/Qwen-Image's transformer/config.json, and the parameters of its other parts (Qwen2.5-VL-7B and the
# VAE).
PUBLISHED: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "axes_dims_rope": (16, 56, 56),
}
PUBLISHED_PARTS = {"text_encoder": 8_292_166_656, "vae": 126_892_531}

PIXELS_PER_TOKEN = 16  # each way
TIMESTEP_CHANNELS = 256
# The 12 targets of the published recipes: attention and MLP of both streams. Timestep modulation stays
# frozen.
LORA_TARGETS = (
    *JOINT_ATTENTION,
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
)


def latent_tokens(model: ModelConfig) -> int:
    """Of one image."""
    return (model.height // PIXELS_PER_TOKEN) * (model.width // PIXELS_PER_TOKEN)


@dataclass(frozen=True)
class QwenImageShape(ModelShape):
    """See ModelShape."""

    head_dim: int
    in_channels: int  # of a token's latents
    out_channels: int  # of a latent cell
    text_width: int  # of the prompt's embeddings

    @classmethod
    def find(cls, model: ModelConfig) -> QwenImageShape:
        """Raises ConfigError where the checkpoint's files cannot be read."""
        found = describe(model, "Qwen/Qwen-Image", PUBLISHED, PUBLISHED_PARTS)
        config, tokens = found.transformer, latent_tokens(model)
        return cls(
            source=found.source,
            layers=config["num_layers"],
            width=config["num_attention_heads"] * config["attention_head_dim"],
            latent_tokens=tokens,
            latent_values=tokens * config["in_channels"],
            frames=1,
            other_parameters=found.parts,
            lora_targets=LORA_TARGETS,
            head_dim=config["attention_head_dim"],
            in_channels=config["in_channels"],
            out_channels=config["out_channels"],
            text_width=config["joint_attention_dim"],
        )

    @property
    def block_linears(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one block: name -> (in, out)."""
        d = self.width
        linears = {f"attn.{name}": (d, d) for name in JOINT_ATTENTION}
        for stream in ("img", "txt"):
            linears |= {
                f"{stream}_mod.1": (d, 6 * d),
                f"{stream}_mlp.net.0.proj": (d, 4 * d),
                f"{stream}_mlp.net.2": (4 * d, d),
            }
        return linears

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        block = self.block_linears
        return {
            f"transformer_blocks.{i}.{name}": size for i in range(self.layers) for name, size in block.items()
        }

    @property
    def block_parameters(self) -> int:
        norms = 4 * self.head_dim  # of queries and keys, of both streams
        return count_linears(self.block_linears) + norms

    @property
    def modulation_parameters(self) -> int:
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

    def condition_values(self, text_tokens: int) -> int:
        return text_tokens * self.text_width

    def linear_flops(self, text_tokens: int) -> float:
        """Two streams of 12 d^2 multiply-adds a token and layer, and modulation once a layer."""
        d, tokens = self.width, self.latent_tokens + text_tokens
        return self.layers * (24 * d**2 * tokens + 24 * d**2)

    def attention_flops(self, text_tokens: int) -> float:
        return self.layers * 4 * self.width * (self.latent_tokens + text_tokens) ** 2
