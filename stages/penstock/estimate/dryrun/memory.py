"""Device memory by lifetime of storages: the peak of a step, and what was live then."""

import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

# kMinBlockSize of c10/core/AllocatorConfig.h (torch 2.13): blocks are multiples of it.
BLOCK = 512
"""Allocation granularity of PyTorch's caching allocator, in bytes."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A storage when it was allocated."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    phase: str
    call_site: str
    """The innermost frame of Penstock, or empty."""
    library: str
    """The innermost frame of PyTorch inside it, or empty."""
    node: str
    """The autograd node that allocated it in a backward pass; empty outside of one."""
    stream: int
    is_forward: bool
    """Whether the forward pass allocated it, or its recomputation."""


@dataclass(frozen=True)
class Peak:
    """The moment of a step with the most live bytes."""

    num_bytes: int
    live: tuple[tuple[int, Allocation, int], ...]
    """(number of the storage, its allocation, its bytes) of each live storage."""


class MemoryTracker:
    """The live storages on the device, and every change since the step began."""

    def __init__(self, describe: Callable[[torch.Tensor], Allocation]) -> None:
        """`describe` returns the allocation of a new tensor."""
        self._describe = describe
        self._numbers: dict[int, int] = {}
        """The number of each live storage by its address, which a later one may have again."""
        self._next_number = itertools.count()
        self._live: dict[int, tuple[Allocation, int]] = {}
        self._at_start: dict[int, tuple[Allocation, int]] = {}
        self._changes: list[tuple[int, Allocation, int]] = []
        """(number of the storage, its allocation, bytes more or less), in order."""

    @property
    def now(self) -> int:
        """Live bytes."""
        return sum(num_bytes for _, num_bytes in self._live.values())

    def storage_number(self, tensor: torch.Tensor) -> int | None:
        """Which storage, of all that were ever tracked, holds a tensor; None if it is not one."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return self._numbers.get(local.untyped_storage()._cdata)

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of these tensors that are new."""
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor) or tensor.device.type != "cuda":
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._numbers:
                number = self._numbers[storage._cdata] = next(self._next_number)
                self._live[number] = self._describe(tensor), 0
                # PyTorch keeps the Python object of a storage for as long as the storage itself.
                weakref.finalize(storage, self._free, storage._cdata)
                self._resize(number, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow a storage that was resized in place, as FSDP does with gathered weights."""
        number = self._numbers.get(storage._cdata)
        if number is not None:
            self._resize(number, storage.nbytes())

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
            (number, allocation): num_bytes
            for number, (allocation, num_bytes) in self._at_start.items()
        }
        for number, allocation, change in self._changes[:until]:
            key = number, allocation
            live[key] = live.get(key, 0) + change
        return Peak(highest, tuple((*key, size) for key, size in live.items() if size))

    def _resize(self, number: int, num_bytes: int) -> None:
        allocation, before = self._live[number]
        # Fragmentation between blocks is left to `USABLE_MEMORY`.
        size = -(-num_bytes // BLOCK) * BLOCK
        self._live[number] = allocation, size
        if size != before:
            self._changes.append((number, allocation, size - before))

    def _free(self, address: int) -> None:
        number = self._numbers.pop(address)
        allocation, size = self._live.pop(number)
        if size:
            self._changes.append((number, allocation, -size))
