"""Device memory by lifetime of storages: the peak of a step, and what was live then."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor

BLOCK = 512
"""Allocation granularity of PyTorch's caching allocator, in bytes."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A storage when it was allocated."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    phase: str
    where: str
    """The innermost frame of Penstock, or empty."""
    library: str
    """The innermost frame of PyTorch inside it, or empty."""
    node: str
    """The autograd node that allocated it in a backward pass; empty outside of one."""
    stream: int


@dataclass(frozen=True)
class Peak:
    """The moment of a step with the most live bytes."""

    num_bytes: int
    live: tuple[tuple[int, Allocation, int], ...]
    """(storage, its allocation, its bytes) of each live storage."""


class MemoryTracker:
    """The live storages on the device, and every change since the step began."""

    def __init__(self, describe: Callable[[torch.Tensor], Allocation]) -> None:
        """`describe` returns the allocation of a new tensor."""
        self._describe = describe
        self._live: dict[int, tuple[Allocation, int]] = {}
        self._at_start: dict[int, tuple[Allocation, int]] = {}
        self._changes: list[tuple[int, Allocation, int]] = []
        """(storage, allocation, bytes more or less), in order."""

    @property
    def now(self) -> int:
        """Live bytes."""
        return sum(num_bytes for _, num_bytes in self._live.values())

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of these tensors that are new."""
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor) or tensor.device.type != "cuda":
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._live:
                self._live[key] = self._describe(tensor), 0
                weakref.finalize(storage, self._free, key)
                self._resize(key, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow a storage that was resized in place, as FSDP does with gathered weights."""
        if storage._cdata in self._live:
            self._resize(storage._cdata, storage.nbytes())

    def start_step(self) -> None:
        """Look for the peak from here on."""
        self._at_start = dict(self._live)
        self._changes.clear()

    def peak(self) -> Peak:
        """The peak since the step began."""
        now = highest = sum(num_bytes for _, num_bytes in self._at_start.values())
        until = 0
        for index, (_, _, change) in enumerate(self._changes, 1):
            now += change
            if now > highest:
                highest, until = now, index
        live = {
            (storage, allocation): num_bytes
            for storage, (allocation, num_bytes) in self._at_start.items()
        }
        for storage, allocation, change in self._changes[:until]:
            key = storage, allocation
            live[key] = live.get(key, 0) + change
        return Peak(highest, tuple((*key, size) for key, size in live.items() if size))

    def _resize(self, key: int, num_bytes: int) -> None:
        allocation, before = self._live[key]
        size = -(-num_bytes // BLOCK) * BLOCK
        self._live[key] = allocation, size
        if size != before:
            self._changes.append((key, allocation, size - before))

    def _free(self, key: int) -> None:
        allocation, size = self._live.pop(key)
        if size:
            self._changes.append((key, allocation, -size))
