"""From our settings to a loaded worker, and proof that it does what the settings say."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.data import (
    AttentionConfig,
    AttentionSpec,
    DiffusionParallelConfig,
    OmniDiffusionConfig,
)

from omnirl_hpc.config.schema import Config, RolloutConfig
from omnirl_hpc.errors import ConfigError, EngineError
from omnirl_hpc.layout import Layout
from omnirl_hpc.models.family import VllmOmniDriver
from omnirl_hpc.rollout.vllm_omni.worker import SpmdWorker

# rollout.attention -> (vLLM-Omni's backend, the name of its attention class, modules that its kernels may
# come from)
ATTENTION = {
    "sdpa": ("TORCH_SDPA", "SDPA", ()),
    "fa3": ("FLASH_ATTN", "FLASH_ATTN", ("fa3_fwd_interface", "flash_attn_interface")),
    "flash_attn": ("FLASH_ATTN", "FLASH_ATTN", ("flash_attn",)),
}


def make_worker(config: Config, driver: VllmOmniDriver, layout: Layout, device: torch.device) -> SpmdWorker:
    """Load this rank's part of the model.

    Raises ConfigError for settings that this device cannot run, EngineError where the engine chose something
    else in silence.
    """
    rollout = config.rollout
    if device.type == "cpu" and (rollout.compile or rollout.attention != "sdpa"):
        raise ConfigError(
            "rollout.compile=true and rollout.attention other than sdpa need a GPU: "
            "set rollout.compile=false rollout.attention=sdpa"
        )
    od_config = OmniDiffusionConfig(
        model=config.model.path,
        model_class_name=json.loads((Path(config.model.path) / "model_index.json").read_text())[
            "_class_name"
        ],
        dtype=getattr(torch, rollout.dtype),
        enforce_eager=not rollout.compile,
        max_num_seqs=rollout.micro_batch_size,
        parallel_config=DiffusionParallelConfig(
            tensor_parallel_size=rollout.tensor_parallel_size,
            ulysses_degree=rollout.ulysses_degree,
            cfg_parallel_size=rollout.cfg_parallel_size,
        ),
        diffusion_attention_config=AttentionConfig(
            default=AttentionSpec(backend=ATTENTION[rollout.attention][0])
        ),
        **driver.engine_options(),
    )
    od_config.enrich_config()
    worker = SpmdWorker(od_config, layout.replica_size, device)
    pipeline = worker.model_runner.pipeline
    for name, component in driver.components(pipeline).items():
        if name != "transformer":  # upstream leaves the others in the dtype of their files
            component.to(od_config.dtype)
    check_choices(rollout, pipeline.transformer)
    return worker


def keeps_host_copy(config: Config) -> bool:
    """Whether the weights have a copy on the host: to sleep, or to merge an adapter into the clean values."""
    return config.residency != "resident" or (
        config.actor.adapter is not None and config.rollout.lora == "merged"
    )


def check_choices(rollout: RolloutConfig, transformer: nn.Module) -> None:
    """Upstream falls back with a warning, or without. Raises EngineError where it did."""
    _, name, modules = ATTENTION[rollout.attention]
    found = {
        module.attn_backend.get_name() for module in transformer.modules() if isinstance(module, Attention)
    }
    if found != {name}:
        raise EngineError(
            f"rollout.attention={rollout.attention} was asked for, vllm-omni uses {', '.join(sorted(found))}"
        )
    if modules:
        from vllm_omni.diffusion.attention.backends.utils import fa

        kernels = getattr(fa.flash_attn_func, "__module__", "none")
        if kernels.split(".")[0] not in modules:
            raise EngineError(
                f"rollout.attention={rollout.attention} was asked for, "
                f"vllm-omni takes its kernels from {kernels}"
            )
    forwards = (getattr(module, "_omni_original_forward", module.forward) for module in transformer.modules())
    if rollout.compile and not any(hasattr(forward, "_torchdynamo_orig_callable") for forward in forwards):
        raise EngineError("rollout.compile=true was asked for, and vllm-omni left every block uncompiled")
