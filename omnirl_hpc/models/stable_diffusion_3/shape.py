"""The shape of Stable Diffusion 3.5's parts: parameters, FLOPs, widths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omnirl_hpc.config.schema import ModelConfig
from omnirl_hpc.models.shape import JOINT_ATTENTION, ModelShape, count_linears, describe

# stabilityai/stable-diffusion-3.5-medium's transformer/config.json, and the parameters of its other parts
# (two CLIP text models, the encoder of T5-XXL, the VAE).
PUBLISHED: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
}
PUBLISHED_PARTS = {
    "text_encoder": 123_650_304,
    "text_encoder_2": 694_659_840,
    "text_encoder_3": 4_762_310_656,
    "vae": 83_819_683,
}

PIXELS_PER_CELL, PATCH = 8, 2  # pixels of a latent cell, cells of a token, each way
CLIP_TOKENS, T5_TOKENS = 77, 256
TEXT_WIDTH = CLIP_TOKENS + T5_TOKENS
TIMESTEP_CHANNELS = 256
LORA_TARGETS = JOINT_ATTENTION
SELF_ATTENTION = JOINT_ATTENTION[:4]
TEXT_OUTPUT = JOINT_ATTENTION[-1]


def latent_tokens(model: ModelConfig) -> int:
    """Of one image."""
    return (model.height // PIXELS_PER_CELL // PATCH) * (model.width // PIXELS_PER_CELL // PATCH)


@dataclass(frozen=True)
class StableDiffusion3Shape(ModelShape):
    """See ModelShape. Blocks differ: some attend over the image alone a second time, and the last one has no
    text to hand on.
    """

    head_dim: int
    in_channels: int  # of a latent cell
    out_channels: int
    text_channels: int
    pooled_channels: int
    dual_layers: frozenset[int]
    has_norms: bool  # of queries and keys

    @classmethod
    def find(cls, model: ModelConfig) -> StableDiffusion3Shape:
        """Raises ConfigError where the checkpoint's files cannot be read."""
        found = describe(model, "stabilityai/stable-diffusion-3.5-medium", PUBLISHED, PUBLISHED_PARTS)
        config = found.transformer
        cells = (model.height // PIXELS_PER_CELL) * (model.width // PIXELS_PER_CELL)
        return cls(
            source=found.source,
            layers=config["num_layers"],
            width=config["num_attention_heads"] * config["attention_head_dim"],
            latent_tokens=latent_tokens(model),
            latent_values=cells * config["in_channels"],
            frames=1,
            other_parameters=found.parts,
            lora_targets=LORA_TARGETS,
            head_dim=config["attention_head_dim"],
            in_channels=config["in_channels"],
            out_channels=config["out_channels"],
            text_channels=config["joint_attention_dim"],
            pooled_channels=config["pooled_projection_dim"],
            dual_layers=frozenset(config["dual_attention_layers"]),
            has_norms=config["qk_norm"] is not None,
        )

    def block_linears(self, layer: int) -> dict[str, tuple[int, int]]:
        """The linear layers of one block: name -> (in, out)."""
        d, dual, last = self.width, layer in self.dual_layers, layer == self.layers - 1
        linears = {
            "norm1.linear": (d, (9 if dual else 6) * d),
            "norm1_context.linear": (d, (2 if last else 6) * d),
            **{f"attn.{name}": (d, d) for name in JOINT_ATTENTION if name != TEXT_OUTPUT},
            "ff.net.0.proj": (d, 4 * d),
            "ff.net.2": (4 * d, d),
        }
        if dual:
            linears |= {f"attn2.{name}": (d, d) for name in SELF_ATTENTION}
        if not last:
            linears |= {
                f"attn.{TEXT_OUTPUT}": (d, d),
                "ff_context.net.0.proj": (d, 4 * d),
                "ff_context.net.2": (4 * d, d),
            }
        return linears

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        return {
            f"transformer_blocks.{layer}.{name}": size
            for layer in range(self.layers)
            for name, size in self.block_linears(layer).items()
        }

    @property
    def block_parameters(self) -> int:
        return max(self._block_parameters(layer) for layer in range(self.layers))

    def _block_parameters(self, layer: int) -> int:
        norms = (6 if layer in self.dual_layers else 4) * self.head_dim * self.has_norms
        return count_linears(self.block_linears(layer)) + norms

    @property
    def modulation_parameters(self) -> int:
        return count_linears({name: size for name, size in self.linears.items() if ".norm1" in name})

    @property
    def transformer_parameters(self) -> int:
        d, cell = self.width, PATCH**2
        ends = {
            "pos_embed.proj": (cell * self.in_channels, d),
            "timestep_embedder.linear_1": (TIMESTEP_CHANNELS, d),
            "timestep_embedder.linear_2": (d, d),
            "text_embedder.linear_1": (self.pooled_channels, d),
            "text_embedder.linear_2": (d, d),
            "context_embedder": (self.text_channels, d),
            "norm_out.linear": (d, 2 * d),
            "proj_out": (d, cell * self.out_channels),
        }
        return sum(self._block_parameters(layer) for layer in range(self.layers)) + count_linears(ends)

    def condition_values(self, text_tokens: int) -> int:
        return text_tokens * self.text_channels + self.pooled_channels

    def linear_flops(self, text_tokens: int) -> float:
        """Each stream has weights of its own, and modulation is computed once."""
        total = 0
        for name, (i, o) in self.linears.items():
            of_text = any(part in name for part in (".add_", ".to_add_out", ".ff_context."))
            times = 1 if ".norm1" in name else text_tokens if of_text else self.latent_tokens
            total += 2 * i * o * times
        return total

    def attention_flops(self, text_tokens: int) -> float:
        both, image = (self.latent_tokens + text_tokens) ** 2, self.latent_tokens**2
        return 4 * self.width * (self.layers * both + len(self.dual_layers) * image)
