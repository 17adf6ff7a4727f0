"""LoRA on a diffusers transformer, the same way for the actor and for the diffusers engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig as PeftConfig
from torch import Tensor, nn

from omnirl_hpc.config.schema import LoraConfig
from omnirl_hpc.errors import CheckpointError, ConfigError
from omnirl_hpc.models.experts import tensors_by_name
from omnirl_hpc.sampling.noise import ADAPTER_INIT, standard_normal

if TYPE_CHECKING:
    from diffusers import ModelMixin

ADAPTER = "default"


def add_lora(
    transformer: ModelMixin, config: LoraConfig, targets: Sequence[str], dtype: torch.dtype, seed: int
) -> None:
    """`attach_lora`, with the adapter's first values."""
    attach_lora(transformer, config, targets, dtype)
    for name, parameter in lora_parameters(transformer).items():
        parameter.data.copy_(initial_value(name, parameter.shape, config.rank, seed))


def attach_lora(
    transformer: ModelMixin, config: LoraConfig, targets: Sequence[str], dtype: torch.dtype
) -> None:
    """Freeze `transformer`, on the meta device or another, and add a trainable adapter in `dtype` whose
    values are to be set.

    Raises ConfigError where a target matches no module: a LoRA that trains nothing would look like a run that
    works.
    """
    names = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    missing = [
        target
        for target in targets
        if not any(name == target or name.endswith("." + target) for name in names)
    ]
    if missing:
        raise ConfigError(
            f"actor.lora.target_modules: no linear layer of {type(transformer).__name__} is named "
            f"{', '.join(missing)}"
        )
    transformer.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):  # PEFT draws A, and rounds it to the base's dtype
        transformer.add_adapter(
            PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(targets)), ADAPTER
        )
    for parameter in lora_parameters(transformer).values():
        parameter.data = parameter.data.to(dtype)


def initial_value(name: str, shape: Sequence[int], rank: int, seed: int) -> Tensor:
    """What a new adapter starts as, by PEFT's name, in fp32 on the CPU: A gaussian / rank from `seed` and the
    name, B zero.
    """
    return (
        standard_normal(shape, seed, ADAPTER_INIT, name) / rank if ".lora_A." in name else torch.zeros(shape)
    )


def merge_lora(
    networks: Mapping[str, ModelMixin],
    config: LoraConfig,
    targets: Sequence[str],
    state: Mapping[str, Tensor],
) -> None:
    """Add an adapter, named as by `tensors_by_name`, to the networks' weights: W + alpha / rank B A, computed
    in fp32.

    Raises CheckpointError where the names differ from those that `targets` give.
    """
    for network in networks.values():
        add_lora(network, config, targets, torch.float32, seed=0)
    slots = tensors_by_name(networks, lora_parameters)
    if slots.keys() != state.keys():
        raise CheckpointError(
            f"the adapter does not fit the model: {len(state)} tensors for {len(slots)} places"
        )
    for name, slot in slots.items():
        slot.data.copy_(state[name])
    for network in networks.values():
        network.fuse_lora()
        network.unload_lora()


def peft_config(config: LoraConfig, targets: Sequence[str]) -> dict[str, Any]:
    """adapter_config.json of the adapter."""
    return {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": list(targets),
        "lora_dropout": 0.0,
        "bias": "none",
    }


def lora_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters under PEFT's names: `<module>.lora_A.weight` [rank, in],
    `<module>.lora_B.weight` [out, rank].
    """
    return {
        name.replace(f".{ADAPTER}.", "."): parameter
        for name, parameter in transformer.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    }


def lora_modules(state: Mapping[str, Tensor]) -> set[str]:
    """The modules that a LoRA state dict adapts."""
    return {name.rsplit(".lora_", 1)[0] for name in state}


def base_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A transformer's state dict without its adapter: the names are those that it has where there is none."""
    return {
        name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if ".lora_" not in name
    }
