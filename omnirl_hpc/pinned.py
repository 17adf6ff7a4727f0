"""A set of tensors that can leave the device and come back, bit for bit, without changing their identity.

The tensors' storages are emptied and refilled in place, so that everything that refers to them (modules,
FSDP, optimizer, views) stays valid. Host copies are allocated once and pinned on a GPU machine: 55 GB/s each
way instead of a few.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from omnirl_hpc.errors import OmniRLError

ALIGNMENT = 512  # bytes; any dtype may be viewed in a host copy


@dataclass
class _Entry:
    """One storage and its host copy."""

    storage: torch.UntypedStorage
    device: torch.device
    frozen: bool
    size: int
    host: Tensor | None = None

    def on_device(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)

    def on_host(self) -> Tensor:
        """The host copy, once `_to_host` has made it."""
        assert self.host is not None
        return self.host

    def to_device(self) -> None:
        self.on_device().copy_(self.on_host(), non_blocking=True)


class PinnedTensors:
    """Tensors added once, moved together. On a CPU the same happens between two places in host memory."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._owned: dict[int, torch.UntypedStorage] = {}  # by the address of the mapped storage
        self.offloaded = False

    def add(self, tensors: Iterable[Tensor], frozen: bool) -> None:
        """Add tensors that are on the device; those added before are left out. Views and tied weights move
        once.

        frozen: the values never change, so that they are copied to the host only once.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.resizable():  # a file mapped into memory, on a CPU
                storage = self._own(tensor, storage)
            if (
                storage.nbytes()
            ):  # the storage object's address: data pointers change when storages are refilled
                self._entries.setdefault(
                    storage._cdata, _Entry(storage, tensor.device, frozen, storage.nbytes())
                )

    def save(self) -> None:
        """Make the host copies now: page-locking tens of GiB takes a while, and the first `offload` is then
        as fast as others.
        """
        _to_host([entry for entry in self._entries.values() if entry.host is None])

    def on_host(self, tensor: Tensor) -> Tensor:
        """The host copy of an added tensor, or of a view of one."""
        entry = self._entries[tensor.untyped_storage()._cdata]
        host = entry.on_host().view(tensor.dtype)
        return host.as_strided(
            tensor.size(), tensor.stride(), host.storage_offset() + tensor.storage_offset()
        )

    def offload(self) -> None:
        """Empty the storages. The tensors must not be used until `onload`."""
        _to_host([entry for entry in self._entries.values() if entry.host is None or not entry.frozen])
        for entry in self._entries.values():
            entry.storage.resize_(0)
        self.offloaded = True
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the other side takes its memory from the driver

    def onload(self) -> None:
        """Refill the storages."""
        for entry in self._entries.values():
            entry.storage.resize_(entry.size)
            entry.to_device()
        _wait_for_copies()
        self.offloaded = False

    @contextmanager
    def rewriting(self, parameters: Collection[Tensor]) -> Iterator[None]:
        """Frozen parameters may be written in the `with` block, offloaded or not; those that were not added,
        too.

        Offloaded ones are their host copies meanwhile, and `onload` brings what was written there.
        """
        added = [p for p in parameters if p.untyped_storage()._cdata in self._entries]
        if self.offloaded:
            places = [(parameter, parameter.data) for parameter in added]
            try:
                for parameter in added:
                    parameter.data = self.on_host(parameter)
                yield
            finally:
                for parameter, place in places:
                    parameter.data = place
        else:
            yield
            entries = (self._entries[parameter.untyped_storage()._cdata] for parameter in added)
            _to_host([entry for entry in entries if entry.host is not None])

    def keep(self) -> None:
        """Copy what can change to the host, for `restore`; everything stays where it is.

        What is offloaded has its copy already.
        """
        if not self.offloaded:
            _to_host(self._changing())

    def restore(self) -> None:
        """Undo every change since the last `keep` or `offload`."""
        for entry in self._changing():
            entry.to_device()
        _wait_for_copies()

    def host_bytes(self) -> int:
        """Bytes of host memory held, for good."""
        return sum(entry.size for entry in self._entries.values() if entry.host is not None)

    def _own(self, tensor: Tensor, mapped: torch.UntypedStorage) -> torch.UntypedStorage:
        """Give the tensor, and others on the same mapped storage, memory of its own."""
        if mapped.data_ptr() not in self._owned:
            self._owned[mapped.data_ptr()] = mapped.clone()
        owned = self._owned[mapped.data_ptr()]
        with torch.no_grad():
            tensor.set_(owned, tensor.storage_offset(), tensor.size(), tensor.stride())
        return owned

    def _changing(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if not entry.frozen]


def _to_host(entries: list[_Entry]) -> None:
    """Copy the entries to the host; the first time, make room for them there."""
    homeless = [entry for entry in entries if entry.host is None]
    if homeless:
        sizes = [-(-entry.size // ALIGNMENT) * ALIGNMENT for entry in homeless]
        region = page_locked(sum(sizes), homeless[0].device)
        for entry, part in zip(homeless, region.split(sizes)):
            entry.host = part[: entry.size]
    for entry in entries:
        entry.on_host().copy_(entry.on_device(), non_blocking=True)
    _wait_for_copies()


def page_locked(nbytes: int, device: torch.device) -> Tensor:
    """Host memory [nbytes] uint8 for fast copies from and to `device`; page-locked where that is a GPU.

    One region registered as it is: torch's own pinned allocator rounds every request up to a power of two,
    which for a transformer's weights is half as much again. Raises OmniRLError where the system refuses.
    """
    region = torch.empty(nbytes, dtype=torch.uint8)
    if device.type == "cuda" and nbytes:
        status = int(torch.cuda.cudart().cudaHostRegister(region.data_ptr(), nbytes, 0))
        if status:
            raise OmniRLError(
                f"{nbytes / 2**30:.1f} GiB of host memory cannot be page-locked (CUDA error {status}): "
                "see ulimit -l"
            )
    return region


def _wait_for_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
