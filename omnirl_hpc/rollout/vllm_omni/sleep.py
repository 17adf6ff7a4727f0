"""The engine's weights leave the device and come back.

They are frozen, so their bytes are copied to the host once, at the first sleep; later sleeps only free the device. (vLLM's own
sleep drops the host copy at every wake and copies everything out again, merged adapters included.) The host copy is also
where merged LoRA takes the clean weights from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from typing import Iterator

import torch
from torch import Tensor, nn

from omnirl_hpc.errors import EngineError
from omnirl_hpc.pinned import page_locked

GIB = 2**30
SLACK = 256 * 2**20  # bytes that other libraries may take on the device during a sleep


class SleepingWeights(ABC):
    """The weights of a pipeline. Components named in `awake` (e.g. text_encoder) always stay on the device."""

    def __init__(self, pipeline: nn.Module, awake: list[str]) -> None:
        unknown = [name for name in awake if not isinstance(getattr(pipeline, name, None), nn.Module)]
        if unknown:
            raise EngineError(f"rollout.awake names {', '.join(unknown)}, which {type(pipeline).__name__} does not have")
        self._stay = [tensor for name in awake for tensor in _tensors(getattr(pipeline, name))]
        self.asleep = False

    def sleep(self) -> None:
        """Free the device. Raises EngineError where its memory does not come free."""
        self.save()
        self._release()
        self.asleep = True

    def wake(self) -> None:
        """Bring the weights back as they were loaded, bit for bit."""
        self._restore()
        self.asleep = False

    @abstractmethod
    def save(self) -> None:
        """Copy the weights to the host, the first time; to be called before anything changes them."""

    @abstractmethod
    def clean(self, weight: Tensor) -> Tensor:
        """The values of `weight` (or of a view of one) as they were saved, on the host."""

    @abstractmethod
    def _release(self) -> None: ...

    @abstractmethod
    def _restore(self) -> None: ...


class CudaWeights(SleepingWeights):
    """Weights in vLLM's CuMem pool: their memory is unmapped and mapped again, at the same addresses."""

    def __init__(self, pipeline: nn.Module, awake: list[str], device: torch.device) -> None:
        super().__init__(pipeline, awake)
        from vllm.device_allocator.cumem import CuMemAllocator

        self._device = device
        blocks = {ptr: data for ptr, data in CuMemAllocator.get_instance().pointer_to_data.items() if data.tag == "weights"}
        starts = sorted(blocks)
        stay = {starts[bisect_right(starts, tensor.data_ptr()) - 1] for tensor in self._stay if tensor.numel()}
        self._blocks = {ptr: blocks[ptr] for ptr in starts if ptr not in stay}
        self._starts = list(self._blocks)
        self._nbytes = sum(data.handle[1] for data in self._blocks.values())
        self._host: dict[int, Tensor] = {}

    def clean(self, weight: Tensor) -> Tensor:
        start = self._starts[bisect_right(self._starts, weight.data_ptr()) - 1]
        values = torch.empty(0, dtype=weight.dtype)
        offset = (weight.data_ptr() - start) // weight.element_size()
        block = self._host[start]
        offset += block.storage_offset() // weight.element_size()
        return values.set_(block.untyped_storage(), offset, weight.shape, weight.stride())

    def save(self) -> None:
        if self._host:
            return
        from vllm.device_allocator.cumem import libcudart

        torch.cuda.synchronize(self._device)
        sizes = [data.handle[1] for data in self._blocks.values()]
        self._host = dict(zip(self._blocks, page_locked(self._nbytes, self._device).split(sizes)))
        for ptr, data in self._blocks.items():
            libcudart.cudaMemcpy(self._host[ptr].data_ptr(), ptr, data.handle[1])

    def _release(self) -> None:
        from vllm.device_allocator.cumem import unmap_and_release

        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self._device)[0]
        for data in self._blocks.values():
            unmap_and_release(data.handle)
            data.is_asleep = True
        freed = torch.cuda.mem_get_info(self._device)[0] - free
        if freed < self._nbytes - SLACK:
            raise EngineError(f"the sleeping engine freed {freed / GIB:.2f} GiB of its {self._nbytes / GIB:.2f} GiB on the GPU")

    def _restore(self) -> None:
        from vllm.device_allocator.cumem import create_and_map, libcudart

        torch.cuda.empty_cache()
        for ptr, data in self._blocks.items():
            create_and_map(data.handle)
            data.is_asleep = False
            libcudart.cudaMemcpy(ptr, self._host[ptr].data_ptr(), data.handle[1])


class HostWeights(SleepingWeights):
    """The same on a machine without a GPU: a sleeping tensor's storage is empty, so that using it fails."""

    def __init__(self, pipeline: nn.Module, awake: list[str]) -> None:
        super().__init__(pipeline, awake)
        stay = {tensor.untyped_storage()._cdata for tensor in self._stay}
        originals, owned = [], {}
        for tensor in _tensors(pipeline):
            storage = tensor.untyped_storage()
            if storage._cdata in stay or not tensor.numel():
                continue
            # Weights mapped from a file cannot be resized: own them. Tied weights keep sharing one storage.
            if storage._cdata not in owned:
                originals.append(storage)  # alive until the end, so that no other storage gets its place in memory
                owned[storage._cdata] = storage.clone()
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
                owned[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride()
            )
        self._storages = {storage._cdata: storage for storage in owned.values()}
        self._host: dict[int, torch.UntypedStorage] = {}

    def clean(self, weight: Tensor) -> Tensor:
        host = self._host[weight.untyped_storage()._cdata]
        return torch.empty(0, dtype=weight.dtype).set_(host, weight.storage_offset(), weight.shape, weight.stride())

    def save(self) -> None:
        if not self._host:
            self._host = {key: storage.clone() for key, storage in self._storages.items()}

    def _release(self) -> None:
        for storage in self._storages.values():
            storage.resize_(0)
        held = sum(storage.nbytes() for storage in self._storages.values())
        if held:
            raise EngineError(f"the sleeping engine still holds {held} bytes")

    def _restore(self) -> None:
        for key, storage in self._storages.items():
            storage.resize_(self._host[key].nbytes())
            storage.copy_(self._host[key])


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
