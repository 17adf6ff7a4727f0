"""What plans must know of the trained part of a network: an adapter beside frozen weights, or all weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from omnirl_hpc.config.schema import ActorConfig, LoraConfig
from omnirl_hpc.models.shape import ModelShape
from omnirl_hpc.planning.measured import FULL_SAVED_VECTORS

ADAM_MOMENTS = 2
BYTES = {"float32": 4, "bfloat16": 2}


class TrainedPart(ABC):
    """Sizes are of all ranks that share one copy of the weights."""

    title: str
    dtype: str  # of what the optimizer changes

    @abstractmethod
    def parameters(self, shape: ModelShape) -> int:
        """That the optimizer changes."""

    @abstractmethod
    def frozen_parameters(self, shape: ModelShape) -> int:
        """That the actor holds besides."""

    @abstractmethod
    def engine_parameters(self, shape: ModelShape) -> int:
        """Places in the engine beside its weights."""

    @abstractmethod
    def saved_vectors(self, shape: ModelShape) -> float:
        """What autograd keeps of a token in one block because of this part, in vectors (see measured.py)."""

    @abstractmethod
    def unsharded_gradients(self, shape: ModelShape) -> int:
        """Values whose gradients are there in full before they go to the ranks that keep them."""

    @abstractmethod
    def backward_flops(self, shape: ModelShape, text_width: int) -> float:
        """Of the backward pass of one sample."""

    @abstractmethod
    def least_parameters(self, shapes: Mapping[str, tuple[int, ...]], targets: Sequence[str]) -> int:
        """`parameters`, from the shapes of the network's tensors. targets: of an adapter."""

    def bytes(self, shape: ModelShape) -> float:
        """Of the master weights; Adam's moments have ADAM_MOMENTS times as much."""
        return BYTES[self.dtype] * self.parameters(shape)


class AdapterPart(TrainedPart):
    """LoRA beside frozen weights."""

    title = "LoRA"

    def __init__(self, lora: LoraConfig) -> None:
        self._lora, self.dtype = lora, lora.dtype

    def parameters(self, shape: ModelShape) -> int:
        return shape.lora_parameters(self._lora.rank, self._lora.target_modules)

    def frozen_parameters(self, shape: ModelShape) -> int:
        return shape.transformer_parameters

    def engine_parameters(self, shape: ModelShape) -> int:
        return self.parameters(shape)

    def saved_vectors(self, shape: ModelShape) -> float:
        layers = shape.lora_layers(self._lora.target_modules) / 2  # of each stream
        return layers * self._lora.rank / shape.width

    def unsharded_gradients(self, shape: ModelShape) -> int:
        return 0

    def backward_flops(self, shape: ModelShape, text_width: int) -> float:
        return shape.lora_backward_flops(text_width)

    def least_parameters(self, shapes: Mapping[str, tuple[int, ...]], targets: Sequence[str]) -> int:
        endings = tuple(f".{target}.weight" for target in targets)
        return sum(
            self._lora.rank * sum(shape) for name, shape in shapes.items() if f".{name}".endswith(endings)
        )


class WeightsPart(TrainedPart):
    """All weights, on fp32 masters."""

    title = "weights"
    dtype = "float32"

    def parameters(self, shape: ModelShape) -> int:
        return shape.transformer_parameters

    def frozen_parameters(self, shape: ModelShape) -> int:
        return 0

    def engine_parameters(self, shape: ModelShape) -> int:
        return 0

    def saved_vectors(self, shape: ModelShape) -> float:
        return FULL_SAVED_VECTORS

    def unsharded_gradients(self, shape: ModelShape) -> int:
        return shape.block_parameters

    def backward_flops(self, shape: ModelShape, text_width: int) -> float:
        return shape.full_backward_flops(text_width)

    def least_parameters(self, shapes: Mapping[str, tuple[int, ...]], targets: Sequence[str]) -> int:
        return parameter_count(shapes)


def parameter_count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def trained_part(actor: ActorConfig) -> TrainedPart:
    return WeightsPart() if actor.adapter is None else AdapterPart(actor.adapter)
