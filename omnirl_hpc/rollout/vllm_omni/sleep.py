"""The engine's weights leave the device and come back.

Rollout does not change them, so their bytes are copied to the host once; every later sleep only frees the
device, and merged adapters are never copied out. The host copy is also where merged LoRA takes the clean
weights from, and where new weights are written when all of them are trained.

vLLM's own sleep (CuMem) is not used: it drops the host copy at every wake and copies everything again, allows
one engine in a process, and misses what a loader puts on the GPU outside its pool. Here storages are emptied
and refilled in place, which is the same on every device: what CI tests is what a GPU runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from omnirl_hpc.errors import EngineError
from omnirl_hpc.pinned import PinnedTensors

GIB = 2**30
log = logging.getLogger(__name__)


class SleepingWeights:
    """All weights and buffers of a pipeline but those of the components named in `awake`, which always stay
    on the device.

    Construct it when the weights are on `device` and before an adapter is added.
    """

    def __init__(self, pipeline: nn.Module, awake: list[str], device: torch.device) -> None:
        unknown = [name for name in awake if not isinstance(getattr(pipeline, name, None), nn.Module)]
        if unknown:
            raise EngineError(
                f"rollout.awake names {', '.join(unknown)}, which {type(pipeline).__name__} does not have"
            )
        self._device = device
        stay = {
            tensor.untyped_storage()._cdata for name in awake for tensor in _tensors(getattr(pipeline, name))
        }
        self._pinned = PinnedTensors()
        self._pinned.add(
            (t for t in _tensors(pipeline) if t.untyped_storage()._cdata not in stay), frozen=True
        )

    @property
    def asleep(self) -> bool:
        return self._pinned.offloaded

    def save(self) -> None:
        """Copy the weights to the host, the first time; to be called before anything changes them."""
        self._pinned.save()

    def sleep(self) -> None:
        """Free the device. Raises EngineError where somebody else still holds the weights' memory."""
        before, reserved = self._held()
        self._pinned.offload()
        after, still_reserved = self._held()
        size = self._pinned.host_bytes()
        if self._device.type == "cuda" and before - after < size:
            raise EngineError(
                f"the sleeping engine freed {(before - after) / GIB:.2f} GiB of its {size / GIB:.2f} GiB on "
                f"{self._device}"
            )
        # Segments that the weights share with tensors that are still there stay reserved: fragmentation,
        # worth knowing.
        log.info("engine asleep: %.2f of %.2f GiB given back", (reserved - still_reserved) / GIB, size / GIB)

    def wake(self) -> None:
        """Bring the weights back as they were saved, bit for bit."""
        self._pinned.onload()

    def clean(self, weight: Tensor) -> Tensor:
        """The values of `weight` (or of a view of one) as they were saved, on the host."""
        return self._pinned.on_host(weight)

    def rewriting(self, module: nn.Module) -> AbstractContextManager[None]:
        """Replace the weights of a component in the `with` block: asleep,
        what is written comes with `wake`.
        """
        return self._pinned.rewriting(list(module.parameters()))

    def _held(self) -> tuple[int, int]:
        """Bytes in tensors, and bytes that torch has reserved for tensors, on the GPU."""
        if self._device.type != "cuda":
            return 0, 0
        return torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
