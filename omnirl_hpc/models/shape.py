"""What plans need to know of a model: parameters, widths and floating-point operations. Arithmetic, without
the model.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omnirl_hpc.config.schema import ModelConfig
from omnirl_hpc.errors import ConfigError

# The projections of diffusers' joint attention, of images and of text
JOINT_ATTENTION = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
)


@dataclass(frozen=True)
class ModelShape(ABC):
    """Of a checkpoint where there is one, else of the published model."""

    source: str
    layers: int  # blocks of the denoising network
    width: int  # of their hidden states
    latent_tokens: int  # of one sample
    latent_values: int  # of one sample's latents, in all streams
    frames: int  # of one sample; 1: images
    other_parameters: Mapping[str, int]  # of encoders and decoders, by component
    lora_targets: Sequence[str]  # where settings name none

    @property
    @abstractmethod
    def linears(self) -> dict[str, tuple[int, int]]:
        """The linear layers of all blocks: name -> (in, out)."""

    @property
    @abstractmethod
    def transformer_parameters(self) -> int:
        """Of the denoising network."""

    @property
    @abstractmethod
    def block_parameters(self) -> int:
        """Of the largest block."""

    @property
    @abstractmethod
    def modulation_parameters(self) -> int:
        """Of all layers that an engine does not split over the ranks of a replica."""

    @abstractmethod
    def condition_values(self, text_tokens: int) -> int:
        """Numbers in the condition of one prompt."""

    @abstractmethod
    def linear_flops(self, text_tokens: int) -> float:
        """Floating-point operations of one forward pass of all blocks on one sample, but for attention."""

    @abstractmethod
    def attention_flops(self, text_tokens: int) -> float:
        """The product of queries and keys and that of weights and values."""

    def forward_flops(self, text_tokens: int) -> float:
        """Of one forward pass of the denoising network on one sample."""
        return self.linear_flops(text_tokens) + self.attention_flops(text_tokens)

    def lora_backward_flops(self, text_tokens: int) -> float:
        """Of the backward pass where only LoRA is trained: gradients of inputs, not of weights; attention
        with its scores.
        """
        return self.linear_flops(text_tokens) + 2.5 * self.attention_flops(text_tokens)

    def full_backward_flops(self, text_tokens: int) -> float:
        """The same where all weights are trained: gradients of weights, too, which are as much again but for
        attention.
        """
        return self.lora_backward_flops(text_tokens) + self.linear_flops(text_tokens)

    def lora_parameters(self, rank: int, targets: Sequence[str] | None) -> int:
        """Of an adapter on `targets` (None: the published ones) in every block."""
        return rank * sum(i + o for i, o in self._adapted(targets))

    def lora_layers(self, targets: Sequence[str] | None) -> float:
        """Adapted linear layers of one block, on the average."""
        return len(self._adapted(targets)) / self.layers

    def _adapted(self, targets: Sequence[str] | None) -> list[tuple[int, int]]:
        ends = tuple("." + target for target in targets or self.lora_targets)
        return [size for name, size in self.linears.items() if f".{name}".endswith(ends)]


@dataclass(frozen=True)
class Description:
    """What the arithmetic of a family starts from."""

    source: str  # where it was found
    transformer: Mapping[str, Any]  # the settings of the denoising network
    parts: Mapping[str, int]  # parameters of encoders and decoders, by component


def describe(
    model: ModelConfig, title: str, transformer: Mapping[str, Any], parts: Mapping[str, int]
) -> Description:
    """Of the checkpoint where there is one; else of the published model `title`, whose description the others
    are. Raises ConfigError where the checkpoint's files cannot be read.
    """
    folder = Path(model.path)
    file = folder / "transformer" / "config.json"
    if not file.is_file():
        return Description(f"{title} as published", transformer, parts)
    return Description(
        source=f"the files in {folder}",
        transformer={**transformer, **read_settings(file)},
        parts={part: count_parameters(folder / part) for part in parts},
    )


def count_linears(linears: Mapping[str, tuple[int, int]]) -> int:
    """Parameters of linear layers with biases: name -> (in, out)."""
    return sum(i * o + o for i, o in linears.values())


@cache
def count_parameters(folder: Path) -> int:
    """Of the safetensors files in a folder, from their headers alone. Raises ConfigError where they are
    damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no safetensors files: the checkpoint is not complete")
    return sum(
        math.prod(tensor["shape"])
        for file in files
        for name, tensor in _header(file).items()
        if name != "__metadata__"
    )


def read_settings(file: Path) -> dict[str, Any]:
    """A component's configuration file. Raises ConfigError where it cannot be read."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"{file} is not a whole safetensors file: {error}") from None
