"""FSDP2 over diffusers' transformer, with PEFT LoRA or trained as a whole: the general implementation of
Actor.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from omnirl_hpc.actor.attention import set_attention
from omnirl_hpc.actor.compile import compile_blocks, repeated_blocks
from omnirl_hpc.actor.ema import ema_decay, update_ema
from omnirl_hpc.actor.loading import fill_from_files
from omnirl_hpc.actor.optimizer import make_optimizer, optimizer_tensors
from omnirl_hpc.algorithms.algorithm import CURRENT, REFERENCE, TrainingPoint
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import CheckpointError, ConfigError, NonFiniteError
from omnirl_hpc.layout import Layout
from omnirl_hpc.models.family import ModelFamily, Numerics
from omnirl_hpc.models.lora import attach_lora, initial_value, lora_parameters
from omnirl_hpc.pinned import PinnedTensors
from omnirl_hpc.sampling.streams import Streams


class FSDPActor:
    """See Actor."""

    def __init__(self, config: Config, family: ModelFamily, layout: Layout, device: torch.device) -> None:
        self._config = config
        self._family = family
        self._guidance = family.guidance(config.sampling)
        self._numerics = Numerics(batched_cfg=config.actor.cfg == "batched")
        self._full = config.actor.train == "full"
        transformer = family.empty_transformer(
            torch.float32 if self._full else getattr(torch, config.actor.dtype)
        )
        if self._full:
            self.lora_targets = ()
            transformer.requires_grad_(True)
        else:
            self.lora_targets = tuple(config.actor.lora.target_modules or family.lora_targets)
            attach_lora(
                transformer, config.actor.lora, self.lora_targets, getattr(torch, config.actor.lora.dtype)
            )
        set_attention(transformer, config.actor.attention, device)
        if config.actor.activation_checkpointing:
            transformer.enable_gradient_checkpointing()
        if config.actor.compile:
            compile_blocks(transformer)
        mesh = init_device_mesh(device.type, layout.mesh_shape, mesh_dim_names=("replicate", "shard"))
        # FSDP warns of in-place operations on the output, which is a view; nothing here makes any.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._transformer = shard(transformer, mesh, getattr(torch, config.actor.dtype))
        fill_from_files(transformer, Path(config.model.path) / "transformer", device)
        self._parameters = (
            dict(transformer.named_parameters()) if self._full else lora_parameters(transformer)
        )
        if not self._full:
            for name, parameter in self._parameters.items():
                _fill(parameter, initial_value(name, parameter.shape, config.actor.lora.rank, config.seed))
        self._optimizer, self._scheduler = make_optimizer(self._parameters, config.actor.optimizer)
        self._ema: dict[str, Tensor] = {}  # fp32, sharded like the parameters
        if config.actor.ema_decay is not None:
            self._ema = {
                name: parameter.detach().to(torch.float32, copy=True)
                for name, parameter in self._parameters.items()
            }
        self._pinned = PinnedTensors()
        trained = (self._parameters, self.optimizer_state(), self._ema)
        self._pinned.add((local(t) for tensors in trained for t in tensors.values()), frozen=False)
        self._pinned.add(
            (local(t) for t in [*self._transformer.parameters(), *self._transformer.buffers()]), frozen=True
        )
        self._kept_scheduler = self._scheduler.state_dict()
        self._updates_on_host = self._scheduler.last_epoch  # of which the host has the outcome

    def offload(self) -> None:
        for module in self._transformer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the root stays gathered after a forward pass without gradients
        self._optimizer.zero_grad()
        self._pinned.offload()
        self._updates_on_host = self._scheduler.last_epoch

    def onload(self) -> None:
        self._pinned.onload()

    def velocity(self, point: TrainingPoint, adapter: str) -> Streams:
        if self._pinned.offloaded:
            raise RuntimeError("the actor is offloaded: onload() it before use")
        dtype = getattr(torch, self._config.actor.dtype)
        with self._adapter(adapter):
            return self._family.velocity(
                self._transformer,
                point.latents,
                point.timesteps,
                _in_dtype(point.conditions, dtype),
                None if point.negative is None else _in_dtype(point.negative, dtype),
                self._guidance,
                self._numerics,
            )

    def apply_gradients(self) -> tuple[float, float]:
        norm = torch.nn.utils.clip_grad_norm_(
            self._parameters.values(), self._config.actor.optimizer.max_grad_norm
        )
        norm = float(norm.full_tensor())
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient norm is {norm}: the update was not applied")
        lr = self._scheduler.get_last_lr()[0]
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        if self._ema:
            decay = ema_decay(
                self._scheduler.last_epoch, self._config.actor.ema_decay
            )  # last_epoch: optimizer steps so far
            update_ema(_locals(self._ema), _locals(self._parameters), decay)
        return norm, lr

    def trained(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield name, parameter.detach().to(dtype or parameter.dtype).full_tensor()

    def lora_state(self) -> dict[str, Tensor]:
        return dict(self.trained())

    def load_lora_state(self, state: dict[str, Tensor]) -> None:
        _load(self._parameters, state)

    def ema_state(self) -> dict[str, Tensor] | None:
        return {name: tensor.full_tensor() for name, tensor in self._ema.items()} or None

    def load_ema_state(self, state: dict[str, Tensor]) -> None:
        _load(self._ema, state)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p.grad.full_tensor()) for name, p in self._parameters.items() if p.grad is not None)

    def full_optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        return (
            (name, t.full_tensor() if isinstance(t, DTensor) else t)
            for name, t in self.optimizer_state().items()
        )

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's own sharded tensors by name."""
        return optimizer_tensors(self._optimizer, self._parameters)

    def sharded_state(self) -> dict[str, Tensor]:
        weights = (
            {name: parameter.detach() for name, parameter in self._parameters.items()} if self._full else {}
        )
        return weights | self.optimizer_state()

    def scheduler_state(self) -> dict[str, Any]:
        return {key: value for key, value in self._scheduler.state_dict().items() if key != "lr_lambdas"}

    def load_scheduler_state(self, state: dict[str, Any]) -> None:
        self._scheduler.load_state_dict(
            state | {"lr_lambdas": [None]}
        )  # None: the function is the configuration's
        for group, lr in zip(self._optimizer.param_groups, self._scheduler.get_last_lr()):
            group["lr"] = lr

    def keep(self) -> None:
        self._pinned.keep()
        self._updates_on_host = self._scheduler.last_epoch
        self._kept_scheduler = self.scheduler_state()

    def rollback(self) -> None:
        if self._updates_on_host != self._kept_scheduler["last_epoch"]:
            raise RuntimeError("what was kept is gone: the actor was updated and offloaded since")
        self._optimizer.zero_grad()
        self._pinned.restore()
        self.load_scheduler_state(self._kept_scheduler)

    @contextmanager
    def _adapter(self, adapter: str) -> Iterator[None]:
        """Evaluate under an adapter set for the length of a `with` block."""
        if adapter not in (CURRENT, REFERENCE):
            raise ValueError(f"unknown adapter set {adapter!r}")
        if self._full:
            if adapter == REFERENCE:
                raise ConfigError(
                    "the algorithm needs the reference, the model without its adapter: set actor.train=lora"
                )
            yield
            return
        if adapter == REFERENCE:
            self._transformer.disable_adapters()
        try:
            yield
        finally:
            self._transformer.enable_adapters()


def _in_dtype(conditions: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Masks and token ids stay as they are."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in conditions.items()
    }


def _load(sharded: Mapping[str, DTensor], state: Mapping[str, Tensor]) -> None:
    """Full tensors into sharded ones, in place."""
    if state.keys() != sharded.keys():
        raise CheckpointError(
            f"the adapter does not fit the model: {_difference(state.keys(), sharded.keys())}"
        )
    for name, tensor in sharded.items():
        if state[name].shape != tensor.shape:
            raise CheckpointError(
                f"the adapter has {name} {tuple(state[name].shape)}, the model {tuple(tensor.shape)}"
            )
        _fill(tensor, state[name])


@torch.no_grad()
def _fill(sharded: DTensor, value: Tensor) -> None:
    """A full tensor, the same on every rank, into a sharded one."""
    full = value.to(sharded.device, sharded.dtype)
    sharded.copy_(distribute_tensor(full, sharded.device_mesh, sharded.placements, src_data_rank=None))


def _locals(sharded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: local(tensor) for name, tensor in sharded.items()}


def _difference(given: Iterable[str], expected: Iterable[str]) -> str:
    given, expected = set(given), set(expected)
    return f"missing {sorted(expected - given)[:3]}, unknown {sorted(given - expected)[:3]}"


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard(transformer: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> FSDPModule:
    """Shard each repeated block, then the rest, over the mesh's `shard` axis; moves them to the mesh's
    device.

    The forward pass runs in `dtype`, also where master weights are fp32; gradients are reduced in fp32 and
    summed over ranks, since the weights of all samples of an update already sum to 1.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in [*repeated_blocks(transformer), transformer]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo has no pre-multiplied one
    return transformer
