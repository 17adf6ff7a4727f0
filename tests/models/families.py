"""What tests of every family know of each: `FACTS` in facts.py of its folder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from omnirl_hpc.config.classes import built_in, find_class
from omnirl_hpc.config.schema import ModelConfig
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.models.family import DenoisingInputs, ModelFamily
from omnirl_hpc.models.shape import ModelShape
from omnirl_hpc.models.spec import Guidance
from omnirl_hpc.sampling.noise import standard_normal
from omnirl_hpc.sampling.recorder import Recorder
from omnirl_hpc.sampling.samples import Media, stack_conditions
from omnirl_hpc.sampling.streams import Streams
from omnirl_hpc.sampling.windows import Window

FAMILIES = built_in("model")
STEPS = 3
PROMPTS = ('A neon sign that reads "Copper Rocket"', "A cat")  # of different lengths
NEGATIVES = ("", "blurry, ugly")
WIDTHS = [256]  # data.text_lengths


@dataclass(frozen=True)
class StockCall:
    """One sample, as people ask a stock pipeline for it."""

    prompt: str
    negative: str | None  # None: no guidance
    scale: float
    latents: Streams  # [1, …]
    model: ModelConfig
    steps: int = STEPS


@dataclass(frozen=True)
class Facts:
    """What has no rule: found in the stock pipeline, in published files, or by counting."""

    size: dict[str, Any]  # of what tests make, as settings of `model`; height and width differ
    streams: dict[str, tuple[int, ...]]  # shapes of one sample's latents of that size
    stock: Callable[[Any, StockCall], Media]  # what diffusers' own pipeline makes
    published_parts: Callable[[], dict[str, nn.Module]]  # encoders and decoders, by component; on meta
    transformer_parameters: int  # of the published model
    modulation: str  # part of the names of what is outside of the engine's parallel layers
    adapted: int  # layers of the tiny checkpoint with an adapter on the published targets
    unread: tuple[str, ...]  # those on which no output depends: the last block's, for the text alone
    engine_gap: float = 2.5e-7  # of log-probabilities between vLLM-Omni and the actor, in fp32
    rewards: tuple[str, ...] = ("jpeg_compressibility",)


@dataclass(frozen=True)
class FamilyCase:
    """A family on its tiny checkpoint."""

    name: str
    checkpoint: Path
    facts: Facts

    @classmethod
    def make(cls, name: str, folder: Path) -> FamilyCase:
        """Writes the checkpoint to `folder`."""
        importlib.import_module(f"omnirl_hpc.models.{name}.tiny").write_tiny(folder, seed=0)
        return cls(name, folder, importlib.import_module(f"tests.models.{name}.facts").FACTS)

    @cached_property
    def config(self) -> ModelConfig:
        return ModelConfig(family=self.name, path=str(self.checkpoint), **self.facts.size)

    @cached_property
    def family(self) -> ModelFamily:
        return find_class("model", self.name)(self.config)

    @property
    def settings(self) -> tuple[str, ...]:
        """As arguments of `train`."""
        size = (f"model.{key}={value}" for key, value in self.facts.size.items())
        return (f"model={self.name}", *size, f"reward=[{','.join(self.facts.rewards)}]")

    @property
    def shape(self) -> ModelShape:
        return self.family.spec.shape(self.config)

    @property
    def shape_module(self) -> Any:
        return importlib.import_module(f"omnirl_hpc.models.{self.name}.shape")

    def initial(self) -> Streams:
        """[2, …] noise."""
        return {
            name: torch.stack([standard_normal(shape, 0, "test", name, i) for i in range(len(PROMPTS))])
            for name, shape in self.family.stream_shapes().items()
        }

    @torch.no_grad()
    def conditions(self, pipeline: Any, texts: tuple[str, ...] = PROMPTS) -> dict[str, Tensor]:
        """Of these texts, padded to the width of all texts of these tests."""
        encode = self.family.driver("diffusers").encode
        width = self.family.condition_width([*PROMPTS, *NEGATIVES], WIDTHS)
        return stack_conditions([self.family.pad(encode(pipeline, Prompt("0", t)), width) for t in texts])

    def inputs(self, pipeline: Any, scale: float) -> DenoisingInputs:
        negative = self.conditions(pipeline, NEGATIVES) if scale > 1 else None
        return DenoisingInputs(
            self.initial(), self.conditions(pipeline), negative, Guidance({"text": scale}), STEPS
        )


class WatchedRecorder(Recorder):
    """Remembers the velocity of every step, and the latents before it."""

    def __init__(self) -> None:
        super().__init__("sde", 1.0)
        self.steps: list[tuple[str, Tensor, Tensor]] = []  # (stream, latents, velocity)

    def advance(self, stream: str, velocity: Tensor) -> Tensor:
        self.steps.append((stream, self._track(stream).latents.clone(), velocity.clone()))
        return super().advance(stream, velocity)


@torch.no_grad()
def sample(case: FamilyCase, pipeline: Any, inputs: DenoisingInputs) -> tuple[Streams, WatchedRecorder]:
    """Clean latents by ODE steps, of the diffusers driver. The pipeline's scheduler is replaced."""
    recorder, driver = WatchedRecorder(), case.family.driver("diffusers")
    driver.attach(pipeline, recorder)
    noise = {name: x.new_empty((len(x), 0, *x.shape[1:])) for name, x in inputs.initial.items()}
    windows = [Window(0, 0)] * len(PROMPTS)
    recorder.begin(inputs.initial, windows, noise, case.family.schedules(inputs.num_steps))
    driver.denoise(pipeline, inputs)
    return recorder.finish().final, recorder


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
