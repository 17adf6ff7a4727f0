"""The actor's adapter inside the engine: unmerged in slots beside each layer, or merged into the layers'
weights.

Upstream reads adapters from files and keeps them under ids. Here there is one adapter, written in place from
memory, so none can be stale; what is reported back is read from the places the engine computes with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear
from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager

from omnirl_hpc.config.schema import LoraConfig
from omnirl_hpc.models.lora import lora_modules
from omnirl_hpc.rollout.vllm_omni.names import Place, engine_names, find_places, fused_parts

# PEFT names of a module's two matrices: A [rank, in], B [out, rank]
A, B = ".lora_A.weight", ".lora_B.weight"


class EngineLora(ABC):
    """One adapter in the engine's transformer. Methods are collective over the replica."""

    def __init__(self, transformer: Any, config: LoraConfig) -> None:
        self._rank = config.rank
        self._scale = config.alpha / config.rank
        self._parts = fused_parts(transformer.stacked_params_mapping)
        self._layers: dict[str, Any] = {}  # vLLM's

    def places(self, state: dict[str, Tensor]) -> dict[str, Place]:
        """Where each module of `state` is. Modules that the engine lacks are left out."""
        modules = sorted(
            lora_modules(state)
        )  # a set's order differs between ranks, and shards are gathered in this one
        return find_places(modules, self._layers, self._parts)

    @abstractmethod
    def write(self, state: dict[str, Tensor]) -> None:
        """Make the engine compute with `state` (PEFT names, the engine's dtype)."""

    @abstractmethod
    def read_back(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The adapter that the engine computes with, under the names in `state`; modules that are not bound
        are left out.
        """

    @abstractmethod
    def weights_restored(self) -> None:
        """The base weights were brought back from the host."""

    @abstractmethod
    def prepare(self) -> None:
        """Called before the engine computes."""


class AdapterLora(EngineLora):
    """Unmerged: y = W x + B A x. Costs a fifth of rollout at rank 64, and nothing to update."""

    def __init__(self, manager: DiffusionLoRAManager, config: LoraConfig, targets: Sequence[str]) -> None:
        transformer = manager.pipeline.transformer
        super().__init__(transformer, config)
        # Of upstream's manager only the wrapping of layers is used: its registry scales B in place through an
        # alias, ignores a known id, and before 0.30 skips modules that it cannot match without a word.
        manager._replace_layers_with_lora(
            PEFTHelper.from_dict(
                {
                    "r": config.rank,
                    "lora_alpha": config.alpha,
                    "target_modules": [name for target in targets for name in engine_names(target)],
                }
            )
        )
        self._layers = {
            name.removeprefix("transformer."): layer for name, layer in manager._lora_modules.items()
        }

    @torch.no_grad()
    def write(self, state: dict[str, Tensor]) -> None:
        by_layer: dict[str, dict[int, str]] = defaultdict(dict)
        for module, place in self.places(state).items():
            by_layer[place.layer][place.part] = module
        for name, layer in self._layers.items():
            modules = [by_layer[name].get(part) for part in range(layer.n_slices)]
            a = [None if module is None else state[module + A] for module in modules]
            b = [None if module is None else state[module + B] * self._scale for module in modules]
            if not any(modules):
                layer.reset_lora(0)
            elif layer.n_slices == 1:
                layer.set_lora(0, a[0], b[0])
            else:
                layer.set_lora(0, a, b)

    @torch.no_grad()
    def read_back(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for module, place in self.places(state).items():
            layer = self._layers[place.layer]
            if not layer._diffusion_lora_active_slices[place.part]:
                continue
            a = layer.lora_a_stacked[place.part][0, 0, : self._rank]
            b = layer.lora_b_stacked[place.part][0, 0, :, : self._rank]
            if isinstance(layer.base_layer, RowParallelLinear):
                a = gather_shards(a, dim=1)
            elif isinstance(layer.base_layer, ColumnParallelLinear):
                b = gather_shards(b, dim=0)
            sent = state[module + B]
            # The slot holds B times alpha / rank, rounded. Where that is what the sent B gives, B is as sent:
            # dividing would round again.
            unscaled = b / self._scale
            if b.shape == sent.shape:
                unscaled = torch.where(b == sent * self._scale, sent, unscaled)
            found |= {module + A: a, module + B: unscaled}
        return found

    def weights_restored(self) -> None:
        """The adapter is beside the base weights, and stays."""

    def prepare(self) -> None:
        """The layers add the adapter by themselves."""


class MergedLora(EngineLora):
    """Merged: W + B A in place of W, computed in fp32 from the clean W, so that it never drifts. Costs
    nothing in rollout.

    `clean(weight)` gives the frozen values of a weight, on the host.
    """

    def __init__(self, transformer: Any, config: LoraConfig, clean: Callable[[Tensor], Tensor]) -> None:
        super().__init__(transformer, config)
        self._layers = {
            name: module for name, module in transformer.named_modules() if isinstance(module, LinearBase)
        }
        self._clean = clean
        self._state: dict[str, Tensor] = {}
        self._merged: dict[str, Place] = {}  # modules whose layers hold more than the clean weight

    @torch.no_grad()
    def write(self, state: dict[str, Tensor]) -> None:
        for place in self._merged.values():
            weight = self._weight(place)
            weight.copy_(self._clean(weight))
        self._state = {name: tensor.detach().clone() for name, tensor in state.items()}
        self._merged = self.places(state)
        for module, place in self._merged.items():
            weight = self._weight(place)
            weight.copy_(self._merge(weight, module, place))

    @torch.no_grad()
    def read_back(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for module, place in self._merged.items():
            weight = self._weight(place)
            expected = self._merge(self._clean(weight).to(weight.device), module, place)
            if torch.equal(weight, expected):  # a layer that holds anything else counts as not bound
                found |= {name: state[name] for name in (module + A, module + B)}
        return found

    def weights_restored(self) -> None:
        self._merged = {}

    def prepare(self) -> None:
        if self._state and not self._merged:
            self.write(self._state)

    def _weight(self, place: Place) -> Tensor:
        """The rows of a layer's weight that belong to a part of it."""
        layer = self._layers[place.layer]
        return layer.weight.data.split(layer.output_partition_sizes)[place.part]

    def _merge(self, weight: Tensor, module: str, place: Place) -> Tensor:
        layer, a, b = self._layers[place.layer], self._state[module + A], self._state[module + B]
        if isinstance(layer, RowParallelLinear):
            a = a.tensor_split(layer.tp_size, dim=1)[layer.tp_rank]
        elif isinstance(layer, ColumnParallelLinear):
            b = b.tensor_split(layer.tp_size, dim=0)[layer.tp_rank]
        delta = (b.float() * self._scale) @ a.float()
        return (weight.float() + delta).to(weight.dtype)


def gather_shards(shard: Tensor, dim: int) -> Tensor:
    """The whole of a tensor that is split along `dim` over the ranks of the tensor-parallel group."""
    group = get_tp_group()
    if group.world_size == 1:
        return shard
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.world_size)]
    dist.all_gather(shards, shard.contiguous(), group=group.device_group)
    return torch.cat(shards, dim=dim)
