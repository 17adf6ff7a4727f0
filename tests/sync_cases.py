"""Weights to send to an engine, and ways in which not all of them arrive."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from omnirl_hpc.config.schema import Config
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.sampling.noise import standard_normal

SOME = "transformer_blocks.1.attn.to_q.weight"
ALL = 77  # parameters of the tiny transformer


class Weights:
    """What an actor with actor.train=full shows to the engine: the checkpoint's weights, plus noise unless
    the seed is None.
    """

    def __init__(self, config: Config, seed: int | None) -> None:
        self._transformer = QwenImage(config.model).load_transformer(torch.float32)
        self._seed = seed
        self.names: dict[str, str] = {}  # other names that some are sent under

    def weights(self, policy: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._transformer.named_parameters():
            noise = 0.0 if self._seed is None else 0.05 * standard_normal(parameter.shape, self._seed, name)
            yield self.names.get(name, name), (parameter.detach() + noise).to(dtype)


class Torn:
    """An engine that gets other weights than were sent."""

    def __init__(self, engine, tear) -> None:
        self._engine, self._tear = engine, tear

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def load_weights(self, weights, version):
        self._engine.load_weights(self._tear(weights), version)


def one_not_loaded(weights):
    return ((name, tensor) for name, tensor in weights if name != SOME)


def one_other_value(weights):
    """The lowest bit of one value."""
    for name, tensor in weights:
        tensor = tensor.clone()
        if name == SOME:
            tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])[1, 2] ^= 1
        yield name, tensor


def two_swapped(weights):
    """In each other's places."""
    other = SOME.replace("to_q", "to_k")
    return (({SOME: other, other: SOME}.get(name, name), tensor) for name, tensor in weights)


TEARS = (one_not_loaded, one_other_value, two_swapped)
