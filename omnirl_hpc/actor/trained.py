"""What of a transformer is trained: an adapter, or all weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from omnirl_hpc.config.schema import Config, LoraConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.models.family import ModelFamily
from omnirl_hpc.models.lora import attach_lora, initial_value, lora_parameters, peft_config

if TYPE_CHECKING:
    from diffusers import ModelMixin


class Trained(ABC):
    """How the trained part is made, named and left out."""

    base_dtype: torch.dtype  # of the transformer as it is built
    adapter_config: dict[str, Any] | None  # PEFT's settings of the adapter; None: there is none

    @abstractmethod
    def attach(self, transformer: ModelMixin) -> None:
        """Say what has gradients; the parameters are on the meta device and get their values later."""

    @abstractmethod
    def parameters(self, transformer: nn.Module) -> dict[str, nn.Parameter]:
        """What is trained, under PEFT's names for an adapter and under diffusers' for weights."""

    @abstractmethod
    def first_values(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The full values, fp32, of those parameters that the model's files do not hold."""

    @abstractmethod
    @contextmanager
    def left_out(self, transformer: ModelMixin) -> Iterator[None]:
        """The model as it was before training, for the length of a `with` block."""


class TrainedAdapter(Trained):
    """A LoRA adapter on a frozen transformer."""

    def __init__(self, lora: LoraConfig, family: ModelFamily, base_dtype: torch.dtype, seed: int) -> None:
        self._config, self._seed = lora, seed
        self._targets = tuple(lora.target_modules or family.spec.lora_targets)
        self.base_dtype = base_dtype
        self.adapter_config = peft_config(lora, self._targets)

    def attach(self, transformer: ModelMixin) -> None:
        attach_lora(transformer, self._config, self._targets, getattr(torch, self._config.dtype))

    def parameters(self, transformer: nn.Module) -> dict[str, nn.Parameter]:
        return lora_parameters(transformer)

    def first_values(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in parameters.items():
            yield name, initial_value(name, parameter.shape, self._config.rank, self._seed)

    @contextmanager
    def left_out(self, transformer: ModelMixin) -> Iterator[None]:
        transformer.disable_adapters()
        try:
            yield
        finally:
            transformer.enable_adapters()


class TrainedWeights(Trained):
    """All weights, on fp32 masters."""

    base_dtype = torch.float32
    adapter_config = None

    def attach(self, transformer: ModelMixin) -> None:
        transformer.requires_grad_(True)

    def parameters(self, transformer: nn.Module) -> dict[str, nn.Parameter]:
        return dict(transformer.named_parameters())

    def first_values(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    @contextmanager
    def left_out(self, transformer: ModelMixin) -> Iterator[None]:
        raise ConfigError(
            "the algorithm needs the reference, the model without its adapter: set actor.train=lora"
        )
        yield


def what_is_trained(config: Config, family: ModelFamily) -> Trained:
    if config.actor.adapter is None:
        return TrainedWeights()
    return TrainedAdapter(config.actor.adapter, family, getattr(torch, config.actor.dtype), config.seed)
