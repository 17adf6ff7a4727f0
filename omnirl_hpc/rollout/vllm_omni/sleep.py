"""The engine's weights leave the device and come back.

They are frozen, so their bytes are copied to the host once; every later sleep only frees the device, and merged adapters are
never copied out. The host copy is also where merged LoRA takes the clean weights from.

vLLM's own sleep (CuMem) is not used: it drops the host copy at every wake and copies everything again, allows one engine in a
process, and misses what a loader puts on the GPU outside its pool. Here storages are emptied and refilled in place, which is the
same on every device: what CI tests is what a GPU runs.
"""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor, nn

from omnirl_hpc.errors import EngineError
from omnirl_hpc.pinned import page_locked

GIB = 2**30
ALIGNMENT = 64  # bytes; any dtype may be viewed at such an offset
# Part of the weights' size that may stay reserved on a sleeping GPU: segments shared with tensors that are still there.
KEPT_FRACTION, KEPT_BYTES = 0.02, 256 * 2**20


class SleepingWeights:
    """All weights and buffers of a pipeline but those of the components named in `awake`, which always stay on the device.

    Construct it when the weights are on `device` and before an adapter is added.
    """

    def __init__(self, pipeline: nn.Module, awake: list[str], device: torch.device) -> None:
        unknown = [name for name in awake if not isinstance(getattr(pipeline, name, None), nn.Module)]
        if unknown:
            raise EngineError(f"rollout.awake names {', '.join(unknown)}, which {type(pipeline).__name__} does not have")
        self._device = device
        stay = {tensor.untyped_storage()._cdata for name in awake for tensor in _tensors(getattr(pipeline, name))}
        self._storages: dict[int, torch.UntypedStorage] = {}  # tied weights share one
        mapped: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        for tensor in _tensors(pipeline):
            storage = tensor.untyped_storage()
            if storage._cdata in stay or not storage.nbytes():
                continue
            if not storage.resizable():  # a file mapped into memory, on a CPU: own it
                _, own = mapped.setdefault(storage._cdata, (storage, storage.clone()))
                tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
                    own, tensor.storage_offset(), tensor.size(), tensor.stride()
                )
                storage = own
            self._storages[storage._cdata] = storage
        self._places: dict[int, tuple[int, int]] = {}  # offset and size in the host copy
        end = 0
        for key, storage in self._storages.items():
            self._places[key] = (end, storage.nbytes())
            end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        self._size = end
        self._host: Tensor | None = None
        self.asleep = False

    def save(self) -> None:
        """Copy the weights to the host, the first time; to be called before anything changes them."""
        if self._host is not None:
            return
        self._host = page_locked(self._size, self._device)
        for key, storage in self._storages.items():
            self._on_host(key).copy_(self._on_device(storage), non_blocking=True)
        self._wait()

    def sleep(self) -> None:
        """Free the device. Raises EngineError where its memory does not come free."""
        self.save()
        self._wait()
        before = self._reserved()
        for storage in self._storages.values():
            storage.resize_(0)
        freed, expected = before - self._reserved(), self._size * (1 - KEPT_FRACTION) - KEPT_BYTES
        if freed < expected:
            raise EngineError(
                f"the sleeping engine freed {freed / GIB:.2f} GiB of its {self._size / GIB:.2f} GiB on {self._device}"
            )
        self.asleep = True

    def wake(self) -> None:
        """Bring the weights back as they were saved, bit for bit."""
        for key, storage in self._storages.items():
            storage.resize_(self._places[key][1])
            self._on_device(storage).copy_(self._on_host(key), non_blocking=True)
        self._wait()
        self.asleep = False

    def clean(self, weight: Tensor) -> Tensor:
        """The values of `weight` (or of a view of one) as they were saved, on the host."""
        offset, _ = self._places[weight.untyped_storage()._cdata]
        first = offset // weight.element_size() + weight.storage_offset()
        return torch.empty(0, dtype=weight.dtype).set_(self._host.untyped_storage(), first, weight.shape, weight.stride())

    def _on_host(self, key: int) -> Tensor:
        offset, size = self._places[key]
        return self._host[offset : offset + size]

    def _on_device(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def _reserved(self) -> int:
        """Bytes that torch holds on the GPU; on a CPU, those of the weights."""
        if self._device.type != "cuda":
            return sum(storage.nbytes() for storage in self._storages.values())
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
