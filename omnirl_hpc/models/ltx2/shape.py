"""The shape of LTX-2.3's parts: parameters, FLOPs, widths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omnirl_hpc.config.schema import ModelConfig
from omnirl_hpc.models.shape import ModelShape, count_linears, describe

# As diffusers converts Lightricks/LTX-2.3: its class's defaults and 2.3's flags
PUBLISHED: dict[str, Any] = {
    "in_channels": 128,
    "out_channels": 128,
    "num_attention_heads": 32,
    "attention_head_dim": 128,
    "cross_attention_dim": 4096,
    "audio_in_channels": 128,
    "audio_out_channels": 128,
    "audio_num_attention_heads": 32,
    "audio_attention_head_dim": 64,
    "audio_cross_attention_dim": 2048,
    "audio_scale_factor": 4,
    "audio_sampling_rate": 16000,
    "audio_hop_length": 160,
    "num_layers": 48,
    "gated_attn": True,
    "cross_attn_mod": True,
    "audio_gated_attn": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
    "rope_type": "split",
}
# Gemma 3 12B; the others as diffusers converts them from Lightricks' file
PUBLISHED_PARTS = {
    "text_encoder": 12_187_325_040,
    "connectors": 3_172_227_584,
    "vae": 726_105_969,
    "audio_vae": 53_248_146,
    "vocoder": 128_537_448,
}

PIXELS_PER_CELL, FRAMES_PER_CELL = 32, 8
TEXT_WIDTH = 1024
TIMESTEP_CHANNELS = 256
# attention: the stream of its queries, that of its keys and values, the one whose heads it has
ATTENTIONS = {
    "attn1": ("video", "video", "video"),
    "attn2": ("video", "text", "video"),
    "audio_attn1": ("audio", "audio", "audio"),
    "audio_attn2": ("audio", "audio_text", "audio"),
    "audio_to_video_attn": ("video", "audio", "audio"),
    "video_to_audio_attn": ("audio", "video", "audio"),
}
FEED_FORWARD = {"ff": "video", "audio_ff": "audio"}
PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
LORA_TARGETS = (
    *(f"{attention}.{projection}" for attention in ATTENTIONS for projection in PROJECTIONS),
    *(f"{network}.{layer}" for network in FEED_FORWARD for layer in ("net.0.proj", "net.2")),
)
# Vectors that modulate a block, of each stream: 9 of its own layers, 2 of the text's, 5 of the other stream's
MODULATION = 9 + 2 + 5
# Outputs of the networks that make them of the timestep, in widths: the same, but the last 5 in 4 and 1
TIMESTEP_NETWORKS = (9, 2, 4, 1)


def video_cells(model: ModelConfig) -> tuple[int, int, int]:
    """Frames, height and width of a video's latents."""
    frames = (model.frames - 1) // FRAMES_PER_CELL + 1
    return frames, model.height // PIXELS_PER_CELL, model.width // PIXELS_PER_CELL


def audio_cells(model: ModelConfig, network: Mapping[str, Any]) -> int:
    """The length of the latents of a video's sound. network: the settings of the denoising network."""
    frames_a_second = network["audio_sampling_rate"] / network["audio_hop_length"]  # of the spectrogram
    return round(model.frames / model.fps * (frames_a_second / network["audio_scale_factor"]))


def latent_tokens(model: ModelConfig) -> int:
    """Of one video."""
    frames, height, width = video_cells(model)
    return frames * height * width


@dataclass(frozen=True)
class Ltx2Shape(ModelShape):
    """See ModelShape. Tokens of video and of sound have networks of their own, which attend to each other."""

    audio_tokens: int
    audio_width: int
    heads: int
    audio_heads: int
    text_channels: int  # of the video's condition
    audio_text_channels: int
    in_channels: tuple[int, int]  # of video and sound
    out_channels: tuple[int, int]

    @classmethod
    def find(cls, model: ModelConfig) -> Ltx2Shape:
        """Raises ConfigError where the checkpoint's files cannot be read."""
        found = describe(model, "Lightricks/LTX-2.3", PUBLISHED, PUBLISHED_PARTS)
        config, tokens = found.transformer, latent_tokens(model)
        sound = audio_cells(model, config)
        return cls(
            source=found.source,
            layers=config["num_layers"],
            width=config["num_attention_heads"] * config["attention_head_dim"],
            latent_tokens=tokens,
            latent_values=tokens * config["in_channels"] + sound * config["audio_in_channels"],
            frames=model.frames,
            other_parameters=found.parts,
            lora_targets=LORA_TARGETS,
            audio_tokens=sound,
            audio_width=config["audio_num_attention_heads"] * config["audio_attention_head_dim"],
            heads=config["num_attention_heads"],
            audio_heads=config["audio_num_attention_heads"],
            text_channels=config["cross_attention_dim"],
            audio_text_channels=config["audio_cross_attention_dim"],
            in_channels=(config["in_channels"], config["audio_in_channels"]),
            out_channels=(config["out_channels"], config["audio_out_channels"]),
        )

    @property
    def _widths(self) -> dict[str, int]:
        return {
            "video": self.width,
            "audio": self.audio_width,
            "text": self.text_channels,
            "audio_text": self.audio_text_channels,
        }

    @property
    def block_linears(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one block: name -> (in, out)."""
        width, heads = self._widths, {"video": self.heads, "audio": self.audio_heads}
        linears: dict[str, tuple[int, int]] = {}
        for name, (query, key, inside) in ATTENTIONS.items():
            q, k, d = width[query], width[key], width[inside]
            sizes = ((q, d), (k, d), (k, d), (d, q))
            linears |= {f"{name}.{part}": size for part, size in zip(PROJECTIONS, sizes)}
            linears[f"{name}.to_gate_logits"] = (q, heads[inside])
        for name, stream in FEED_FORWARD.items():
            d = width[stream]
            linears |= {f"{name}.net.0.proj": (d, 4 * d), f"{name}.net.2": (4 * d, d)}
        return linears

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        block = self.block_linears
        return {
            f"transformer_blocks.{i}.{name}": size for i in range(self.layers) for name, size in block.items()
        }

    @property
    def block_parameters(self) -> int:
        norms = 2 * sum(self._widths[inside] for _, _, inside in ATTENTIONS.values())  # of queries and keys
        return count_linears(self.block_linears) + norms + self._block_modulation

    @property
    def _block_modulation(self) -> int:
        return MODULATION * (self.width + self.audio_width)

    @property
    def modulation_parameters(self) -> int:
        return self.layers * self._block_modulation

    @property
    def transformer_parameters(self) -> int:
        total = self.layers * self.block_parameters
        for d, c_in, c_out in zip((self.width, self.audio_width), self.in_channels, self.out_channels):
            timestep = {"linear_1": (TIMESTEP_CHANNELS, d), "linear_2": (d, d)}
            for vectors in TIMESTEP_NETWORKS:
                total += count_linears(timestep | {"linear": (d, vectors * d)})
            total += count_linears({"proj_in": (c_in, d), "proj_out": (d, c_out)}) + 2 * d
        return total

    def condition_values(self, text_tokens: int) -> int:
        return text_tokens * (self.text_channels + self.audio_text_channels)

    def _tokens(self, text_tokens: int) -> dict[str, int]:
        sound = self.audio_tokens
        return {
            "video": self.latent_tokens,
            "audio": sound,
            "text": text_tokens,
            "audio_text": text_tokens,
        }

    def linear_flops(self, text_tokens: int) -> float:
        tokens, total = self._tokens(text_tokens), 0
        for name, (i, o) in self.block_linears.items():
            part, _, projection = name.partition(".")
            query, key, _ = ATTENTIONS.get(part, (FEED_FORWARD.get(part, ""), "", ""))
            total += 2 * i * o * tokens[key if projection in ("to_k", "to_v") else query]
        return self.layers * total

    def attention_flops(self, text_tokens: int) -> float:
        tokens = self._tokens(text_tokens)
        pairs = sum(tokens[q] * tokens[k] * self._widths[inside] for q, k, inside in ATTENTIONS.values())
        return 4 * self.layers * pairs
