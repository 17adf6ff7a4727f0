"""A model family from outside of the package, in one file: a video, its sound and a text from it.

Two streams of different shapes and schedules, a network, an encoder and a decoder of a few hundred weights,
and a pipeline that drives its own loop: it asks the recorder for the next latents, and has no scheduler.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from torch import Tensor, nn

from omnirl_hpc.config.schema import ModelConfig
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.models.family import DiffusersDriver, LoopDriver, ModelFamily, PipelineDriver
from omnirl_hpc.models.qwen_image.shape import QwenImageShape
from omnirl_hpc.models.spec import ComponentSpec, FamilySpec, Numerics
from omnirl_hpc.sampling.samples import Condition, Media
from omnirl_hpc.sampling.schedule import Schedule, make_schedule
from omnirl_hpc.sampling.streams import Streams

FRAMES, WIDTH = 3, 16
SHIFTS = {"video": 3.0, "audio": 1.0}


class ToyBlock(nn.Module):
    """Two layers that all tokens share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class ToyTransformer(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """Video tokens [B, V, 4], audio tokens [B, A, 2] -> their velocities.
    The streams see each other's mean.
    """

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(self, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.video_in, self.audio_in = nn.Linear(4, width), nn.Linear(2, width)
        self.video_out, self.audio_out = nn.Linear(width, 4), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(ToyBlock(width) for _ in range(layers))
        self.gradient_checkpointing = False

    def forward(self, video: Tensor, audio: Tensor, times: dict[str, Tensor], text: Tensor) -> Streams:
        context = text.mean(dim=1, keepdim=True)
        tokens = {
            "video": self.video_in(video) + context + times["video"][:, None, None],
            "audio": self.audio_in(audio) + context + times["audio"][:, None, None],
        }
        for block in self.blocks:
            other = {
                "video": tokens["audio"].mean(1, keepdim=True),
                "audio": tokens["video"].mean(1, keepdim=True),
            }
            tokens = {name: block(x + other[name]) for name, x in tokens.items()}
        return {"video": self.video_out(tokens["video"]), "audio": self.audio_out(tokens["audio"])}


class ToyEncoder(ModelMixin, ConfigMixin):
    """A vector for each byte."""

    @register_to_config
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.table = nn.Embedding(256, width)


class ToyDecoder(ModelMixin, ConfigMixin):
    """A pixel for each latent cell, eight samples of sound for each of its latents."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.sound = nn.Linear(4, 3), nn.Linear(2, 8)


class ToyPipeline(nn.Module):
    """What a checkpoint holds."""

    def __init__(self, transformer: ToyTransformer, text_encoder: ToyEncoder, vae: ToyDecoder) -> None:
        super().__init__()
        self.transformer, self.text_encoder, self.vae = transformer, text_encoder, vae


COMPONENTS = {"transformer": ToyTransformer, "text_encoder": ToyEncoder, "vae": ToyDecoder}


def write_toy(out: Path) -> None:
    """A checkpoint in diffusers' layout."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, kind in COMPONENTS.items():
            kind().save_pretrained(out / name)
    index = {name: [__name__, kind.__name__] for name, kind in COMPONENTS.items()}
    (out / "model_index.json").write_text(json.dumps({"_class_name": "ToyPipeline"} | index))


class ToyDriver(LoopDriver, DiffusersDriver):
    """See PipelineDriver."""

    def load(self, dtype: torch.dtype) -> ToyPipeline:
        path = self.family.config.path
        return ToyPipeline(
            **{
                name: kind.from_pretrained(path, subfolder=name).to(dtype)
                for name, kind in COMPONENTS.items()
            }
        )

    def encode(self, pipeline: ToyPipeline, prompt: Prompt) -> Condition:
        table = pipeline.text_encoder.table
        return {"text": table(torch.tensor(list(prompt.prompt.encode()), device=table.weight.device))}


class Toy(ModelFamily):
    """See ModelFamily."""

    spec = FamilySpec(
        title="the toy",
        pipeline_classes=("ToyPipeline",),
        components={name: ComponentSpec(classes=(kind.__name__,)) for name, kind in COMPONENTS.items()},
        numerics={"diffusers": Numerics()},
        pixel_multiple=2,
        max_text_tokens=500,
        text_width=500,
        block_classes=("ToyBlock",),
        lora_targets=("up", "down"),
        latent_tokens=lambda model: 1,
        shape=QwenImageShape.find,  # nobody plans with a toy
        makes=("video", "audio", "text"),
    )
    transformer_class = ToyTransformer

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.size = config.height // 2, config.width // 2

    def driver(self, engine: str) -> PipelineDriver:
        return {"diffusers": ToyDriver}[engine](self)

    def schedules(self, num_steps: int) -> dict[str, Schedule]:
        return {
            name: make_schedule({"shift": shift, "use_dynamic_shifting": False}, num_steps, 0)
            for name, shift in SHIFTS.items()
        }

    def stream_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"video": (4, FRAMES, *self.size), "audio": (2, 5)}

    def tokenized_length(self, text: str) -> int:
        return len(text.encode())

    def pad(self, condition: Condition, width: int) -> Condition:
        text = condition["text"]
        return {"text": nn.functional.pad(text, (0, 0, 0, width - len(text)))}

    def predict(
        self,
        transformer: Any,
        latents: Streams,
        timesteps: Streams,
        conditions: dict[str, Tensor],
        numerics: Numerics,
    ) -> Streams:
        times = {name: t / 1000 for name, t in timesteps.items()}
        made = transformer(latents["video"].flatten(2).mT, latents["audio"].mT, times, conditions["text"])
        return {name: made[name].mT.reshape(x.shape) for name, x in latents.items()}

    @torch.no_grad()
    def decode(self, pipeline: ToyPipeline, latents: Streams) -> Media:
        pixels = pipeline.vae.pixels(latents["video"].permute(0, 2, 3, 4, 1))  # [B, F, H, W, 3]
        frames = torch.sigmoid(pixels).mul(255).round().byte().permute(0, 1, 4, 2, 3)
        sound = torch.tanh(pipeline.vae.sound(latents["audio"].mT)).flatten(1)[:, None]
        letters = latents["audio"].mean(dim=1).gt(0).tolist()  # [B, 5]
        text = ["".join("ab"[int(high)] for high in row) for row in letters]
        return Media(frames=frames, audio=sound, fps=8.0, sample_rate=8000, text=text)
