"""The attention kernel of the actor."""

from __future__ import annotations

import torch
from diffusers import ModelMixin, attention_backend

from omnirl_hpc.errors import ConfigError

# actor.attention -> diffusers' backend. All take masks, which every batch has. sdpa lets torch choose, cudnn
# forces its kernel.
BACKENDS = {
    "sdpa": "native",
    "cudnn": "_native_cudnn",
    "flash_attn": "flash_varlen",
    "fa3": "_flash_varlen_3",
}


def set_attention(transformer: ModelMixin, name: str, device: torch.device) -> None:
    """Make the transformer use a kernel. Raises ConfigError where it is not to be had: another one is never
    taken instead.
    """
    if name == "sdpa":
        return  # diffusers' default
    if device.type != "cuda":
        raise ConfigError(f"actor.attention={name} needs a GPU: use sdpa")
    try:
        with attention_backend(
            "native"
        ):  # it also changes the default of every other model in the process: put that back
            transformer.set_attention_backend(BACKENDS[name])
    except (
        RuntimeError,
        ValueError,
    ) as error:  # what diffusers raises for a missing package and for an unknown backend
        raise ConfigError(f"actor.attention={name}: {error}") from None
