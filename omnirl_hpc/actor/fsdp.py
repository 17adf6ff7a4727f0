"""FSDP2 over diffusers' transformer, with PEFT LoRA or trained as a whole: the general implementation of
Actor.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from omnirl_hpc.actor.attention import set_attention
from omnirl_hpc.actor.compile import compile_blocks, repeated_blocks
from omnirl_hpc.actor.loading import fill_from_files
from omnirl_hpc.actor.optimizer import make_optimizer, optimizer_tensors
from omnirl_hpc.actor.trained import what_is_trained
from omnirl_hpc.algorithms.algorithm import TrainingPoint
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import CheckpointError, MismatchError, NonFiniteError
from omnirl_hpc.layout import Layout
from omnirl_hpc.models.experts import tensors_by_name
from omnirl_hpc.models.family import ModelFamily
from omnirl_hpc.models.spec import actor_numerics
from omnirl_hpc.pinned import PinnedTensors
from omnirl_hpc.policies import CURRENT, EMA, REFERENCE, Blend, is_checkpoint
from omnirl_hpc.sampling.streams import Streams

if TYPE_CHECKING:
    from diffusers import ModelMixin


class FSDPActor:
    """See Actor."""

    def __init__(
        self,
        config: Config,
        family: ModelFamily,
        layout: Layout,
        device: torch.device,
        policies: Iterable[str] = (),
        given: Mapping[str, str] | None = None,
    ) -> None:
        """policies: those that the algorithm needs; what is stored of each starts as the current one. given:
        see Algorithm.given; one that is a checkpoint is a transformer of its own, frozen, and no weights of
        it are stored, saved or handed over.
        """
        self._config = config
        self._family = family
        self._guidance = family.guidance(config.sampling)
        self._numerics = actor_numerics(config)
        self._trained = what_is_trained(config, family)
        self.adapter_config = self._trained.adapter_config
        mesh = init_device_mesh(device.type, layout.mesh_shape, mesh_dim_names=("replicate", "shard"))
        # FSDP warns of in-place operations on the output, which is a view; nothing here makes any.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._networks = {name: self._build(name, mesh, device) for name in family.spec.experts}
        self._parameters = tensors_by_name(self._networks, self._trained.parameters)
        for name, value in self._trained.first_values(self._parameters):
            _fill(self._parameters[name], value)
        self._optimizer, self._scheduler = make_optimizer(self._parameters, config.actor.optimizer)
        averaged = () if config.actor.ema_decay is None else (EMA,)
        models = {policy: path for policy, path in (given or {}).items() if is_checkpoint(path)}
        self._models = {
            policy: {
                name: self._frozen_model(Path(path) / name, mesh, device) for name in family.spec.experts
            }
            for policy, path in models.items()
        }
        wanted = dict.fromkeys((*policies, *averaged))
        stored = [p for p in wanted if p not in (CURRENT, REFERENCE, *self._models)]
        self._stored = {policy: self._copy() for policy in stored}  # fp32, sharded like the parameters
        self.policies = (*stored, CURRENT)
        self._pinned = PinnedTensors()
        changing: list[Mapping[str, Tensor]] = [
            self._parameters,
            self.optimizer_state(),
            *self._stored.values(),
        ]
        self._pinned.add((local(t) for tensors in changing for t in tensors.values()), frozen=False)
        for network in self._all_networks():
            self._pinned.add((local(t) for t in [*network.parameters(), *network.buffers()]), frozen=True)
        self._kept_scheduler = self._scheduler.state_dict()
        self._updates_on_host = self.updates  # of which the host has the outcome

    def _build(self, name: str, mesh: DeviceMesh, device: torch.device) -> ModelMixin:
        """A network of the family: sharded, with its weights."""
        config, family = self._config, self._family
        transformer: ModelMixin = family.empty_transformer(self._trained.base_dtype, name)
        self._trained.attach(transformer)
        set_attention(transformer, config.actor.attention, device)
        if config.actor.activation_checkpointing:
            transformer.enable_gradient_checkpointing()
        blocks = repeated_blocks(transformer, family.spec.block_classes)
        if config.actor.compile:
            compile_blocks(blocks)
        shard(transformer, blocks, mesh, getattr(torch, config.actor.dtype))
        fill_from_files(transformer, Path(config.model.path) / name, device)
        return transformer

    @property
    def updates(self) -> int:
        return self._scheduler.last_epoch

    def sleep(self) -> None:
        self._reshard()
        self._optimizer.zero_grad()
        self._pinned.offload()
        self._updates_on_host = self.updates

    def wake(self) -> None:
        self._pinned.onload()

    @property
    def transformer(self) -> nn.Module:
        return next(iter(self._networks.values()))

    def velocity(self, point: TrainingPoint, policy: str) -> Streams:
        self._require_awake()
        dtype, network = getattr(torch, self._config.actor.dtype), self._network_of(point, policy)
        with self._under(policy):
            return self._family.velocity(
                network,
                point.latents,
                point.timesteps,
                _in_dtype(point.conditions, dtype),
                None if point.negative is None else _in_dtype(point.negative, dtype),
                self._guidance,
                self._numerics,
            )

    def _all_networks(self) -> list[nn.Module]:
        return [n for networks in (self._networks, *self._models.values()) for n in networks.values()]

    def _network_of(self, point: TrainingPoint, policy: str) -> nn.Module:
        """The one that all ranks evaluate a point with: with two, their collective operations would not fit.

        Collective where there are several networks.
        """
        networks = list(self._models.get(policy, self._networks).values())
        if len(networks) == 1:
            return networks[0]
        experts = self._family.experts_at(point.timesteps)
        ends = torch.stack([experts.min(), -experts.max()])
        dist.all_reduce(ends, op=dist.ReduceOp.MIN)
        first, last = int(ends[0]), -int(ends[1])
        if first != last:
            names = self._family.spec.experts
            raise MismatchError(
                f"the samples of a micro-step belong to {names[first]} and to {names[last]}, and one network "
                "is trained at a time: set sampling.window.per=step"
            )
        return networks[first]

    def apply_gradients(self) -> tuple[float, float]:
        self._require_awake()
        limit = self._config.actor.optimizer.max_grad_norm
        norm = float(_full(torch.nn.utils.clip_grad_norm_(self._parameters.values(), limit)))
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient norm is {norm}: the update was not applied")
        lr = float(self._scheduler.get_last_lr()[0])
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        return norm, lr

    def weights(
        self, policy: str = CURRENT, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors(policy).items():
            yield name, _full(tensor.detach().to(dtype or tensor.dtype))

    def load(self, policy: str, state: Mapping[str, Tensor]) -> None:
        _load(self._tensors(policy), state)

    @torch.no_grad()
    def blend(self, blend: Blend) -> None:
        source = self._tensors(blend.source)
        for name, tensor in self._tensors(blend.policy).items():
            value = local(source[name]).to(tensor.dtype)
            if blend.decay == 0:
                local(tensor).copy_(value)  # exactly, which a weighted mean need not be
            else:
                local(tensor).lerp_(value, 1 - blend.decay)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, _full(p.grad)) for name, p in self._parameters.items() if p.grad is not None)

    def full_optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        self._require_awake()
        return (
            (name, t.full_tensor() if isinstance(t, DTensor) else t)
            for name, t in self.optimizer_state().items()
        )

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's own sharded tensors by name."""
        return optimizer_tensors(self._optimizer, self._parameters)

    def sharded_state(self) -> dict[str, Tensor]:
        self._require_awake()
        return self._sharded_weights() | self.optimizer_state()

    def _sharded_weights(self) -> dict[str, Tensor]:
        """Of every policy, where weights are trained: adapters are saved as such."""
        if self.adapter_config is not None:
            return {}
        stored = {
            f"{policy}/{name}": t for policy, tensors in self._stored.items() for name, t in tensors.items()
        }
        return {name: parameter.detach() for name, parameter in self._parameters.items()} | stored

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
        self._updates_on_host = self.updates
        self._kept_scheduler = self.scheduler_state()

    def rollback(self) -> None:
        if self._updates_on_host != self._kept_scheduler["last_epoch"]:
            raise RuntimeError("what was kept is gone: the actor was updated and put to sleep since")
        self._optimizer.zero_grad()
        self._pinned.restore()
        self.load_scheduler_state(self._kept_scheduler)

    def _require_awake(self) -> None:
        """What sleeps has no memory: to read it does not raise, it ends the process."""
        if self._pinned.offloaded:
            raise RuntimeError("the actor is asleep: wake() it before use")

    def _tensors(self, policy: str) -> Mapping[str, Tensor]:
        """The sharded tensors of a policy. Raises ValueError for one that is not held."""
        if policy not in self.policies:
            raise ValueError(f"the actor holds no policy {policy!r}; it holds {', '.join(self.policies)}")
        self._require_awake()
        return self._parameters if policy == CURRENT else self._stored[policy]

    def _frozen_model(self, folder: Path, mesh: DeviceMesh, device: torch.device) -> nn.Module:
        """A network of another checkpoint, as this one is computed with, without gradients."""
        dtype = getattr(torch, self._config.actor.dtype)
        transformer: ModelMixin = self._family.empty_transformer(dtype, folder.name).requires_grad_(False)
        set_attention(transformer, self._config.actor.attention, device)
        blocks = repeated_blocks(transformer, self._family.spec.block_classes)
        shard(transformer, blocks, mesh, dtype)
        fill_from_files(transformer, folder, device)
        return transformer

    def _copy(self) -> dict[str, Tensor]:
        return {name: p.detach().to(torch.float32, copy=True) for name, p in self._parameters.items()}

    @contextmanager
    def _under(self, policy: str) -> Iterator[None]:
        """Predict as a policy does, for the length of a `with` block."""
        if policy == CURRENT or policy in self._models:
            yield
        elif policy == REFERENCE:
            with ExitStack() as left_out:
                for network in self._networks.values():
                    left_out.enter_context(self._trained.left_out(network))
                yield
        else:
            current = {name: tensor.clone() for name, tensor in _locals(self._parameters).items()}
            self._put(_locals(self._tensors(policy)))
            try:
                yield
            finally:
                self._put(current)

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        """This rank's parts of what is trained, by value: autograd and the optimizer keep their tensors."""
        self._reshard()
        for name, parameter in self._parameters.items():
            local(parameter.detach()).copy_(values[name])

    def _reshard(self) -> None:
        """Let go of gathered weights: a root keeps its own after a forward pass."""
        for network in self._all_networks():
            for module in network.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _in_dtype(conditions: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Masks and token ids stay as they are."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in conditions.items()
    }


def _load(sharded: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
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
def _fill(sharded: Tensor, value: Tensor) -> None:
    """A full tensor, the same on every rank, into a sharded one."""
    assert isinstance(sharded, DTensor)
    full = value.to(sharded.device, sharded.dtype)
    sharded.copy_(distribute_tensor(full, sharded.device_mesh, sharded.placements, src_data_rank=None))


def _locals(sharded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: local(tensor.detach()) for name, tensor in sharded.items()}


def _difference(given: Iterable[str], expected: Iterable[str]) -> str:
    given, expected = set(given), set(expected)
    return f"missing {sorted(expected - given)[:3]}, unknown {sorted(given - expected)[:3]}"


def _full(tensor: Tensor) -> Tensor:
    """All of a sharded tensor. Collective."""
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard(transformer: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard each of the blocks, then the rest, over the mesh's `shard` axis; moves them to the mesh's
    device.

    The forward pass runs in `dtype`, also where master weights are fp32; gradients are reduced in fp32 and
    summed over ranks, since the weights of all samples of an update already sum to 1.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in [*blocks, transformer]:
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo has no pre-multiplied one
