"""The weights that the engine computes with, under the names and in the shapes that diffusers has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

from omnirl_hpc.rollout.vllm_omni.lora import gather_shards
from omnirl_hpc.rollout.vllm_omni.names import find_places, fused_parts


def read_weights(transformer: Any, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Those of `names` that the engine has, taken out of fused layers and gathered over the replica; then its
    others, as they are.

    Collective over the replica.
    """
    layers, parameters = dict(transformer.named_modules()), dict(transformer.named_parameters())
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
    places = find_places(modules, layers, fused_parts(transformer.stacked_params_mapping))
    unread = {
        (name, part): tensor
        for name, parameter in parameters.items()
        for part, tensor in enumerate(_parts(layers[name.rpartition(".")[0]], parameter.detach()))
    }
    for name in names:
        module, _, kind = name.rpartition(".")
        if module not in places:
            continue
        place = places[module]
        shard = unread.pop((f"{place.layer}.{kind}", place.part), None)
        if shard is not None:
            yield name, _gather(layers[place.layer], shard)
    yield from ((f"{name}, part {part}", tensor) for (name, part), tensor in unread.items())


def _parts(layer: nn.Module, parameter: Tensor) -> Sequence[Tensor]:
    """One for each projection that the layer is fused of."""
    return (
        parameter.split(layer.output_partition_sizes)
        if isinstance(layer, ColumnParallelLinear)
        else [parameter]
    )


def _gather(layer: nn.Module, shard: Tensor) -> Tensor:
    if isinstance(layer, ColumnParallelLinear):
        return gather_shards(shard, dim=0)
    if isinstance(layer, RowParallelLinear) and shard.dim() == 2:  # its bias is whole on every rank
        return gather_shards(shard, dim=1)
    return shard
