"""FSDP2 over diffusers' transformer with PEFT LoRA: the general implementation of Actor."""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager
from typing import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from omnirl_hpc.actor.optimizer import make_optimizer
from omnirl_hpc.algorithms.algorithm import CURRENT, REFERENCE, TrainingPoint
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import NonFiniteError
from omnirl_hpc.layout import Layout
from omnirl_hpc.models import ModelFamily
from omnirl_hpc.models.lora import add_lora, lora_parameters


class FSDPActor:
    """See Actor."""

    def __init__(self, config: Config, family: ModelFamily, layout: Layout, device: torch.device) -> None:
        self._config = config
        self._family = family
        transformer = family.load_transformer(getattr(torch, config.actor.dtype))
        targets = config.actor.lora.target_modules or family.lora_targets
        add_lora(transformer, config.actor.lora, targets, getattr(torch, config.actor.lora.dtype), config.seed)
        if config.actor.activation_checkpointing:
            transformer.enable_gradient_checkpointing()
        mesh = init_device_mesh(device.type, layout.mesh_shape, mesh_dim_names=("replicate", "shard"))
        # FSDP warns of in-place operations on the output, which is a view; nothing here makes any.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._transformer = shard(transformer, mesh, getattr(torch, config.actor.dtype))
        self._parameters = list(lora_parameters(self._transformer).values())
        self._optimizer, self._scheduler = make_optimizer(self._parameters, config.actor.optimizer)

    def velocity(self, point: TrainingPoint, adapter: str) -> Tensor:
        with self._adapter(adapter):
            return self._family.velocity(
                self._transformer,
                point.latents,
                point.timesteps,
                point.text,
                point.negative,
                self._config.sampling.true_cfg_scale,
                batched=self._config.actor.cfg == "batched",
            )

    def apply_gradients(self) -> tuple[float, float]:
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.actor.optimizer.max_grad_norm)
        norm = float(norm.full_tensor())
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient norm is {norm}: the update was not applied")
        lr = self._scheduler.get_last_lr()[0]
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        return norm, lr

    def lora_state(self) -> dict[str, Tensor]:
        return {name: parameter.full_tensor().detach() for name, parameter in lora_parameters(self._transformer).items()}

    @contextmanager
    def _adapter(self, adapter: str) -> Iterator[None]:
        """Evaluate under an adapter set for the length of a `with` block."""
        if adapter not in (CURRENT, REFERENCE):
            raise ValueError(f"unknown adapter set {adapter!r}")
        if adapter == REFERENCE:
            self._transformer.disable_adapters()
        try:
            yield
        finally:
            self._transformer.enable_adapters()


def shard(transformer: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> FSDPModule:
    """Shard each repeated block, then the rest, over the mesh's `shard` axis; moves them to the mesh's device.

    The forward pass runs in `dtype`, also for an adapter whose master weights are fp32; gradients are reduced in fp32 and
    summed over ranks, since the weights of all samples of an update already sum to 1.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = [m for m in transformer.modules() if type(m).__name__ in transformer._repeated_blocks]
    for module in [*blocks, transformer]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo has no pre-multiplied one
    return transformer
