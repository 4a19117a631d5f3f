"""Activation offloading: saved tensors wait in host memory for the backward pass.

The newest tensors, up to a limit, stay on the device.

Storages are moved, not tensors: tensors that share memory are moved once, and not again for another
tensor. A group is what one call of a layer saves; groups are offloaded and fetched as a whole, so
only the order of calls must be known.
"""

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from penstock.engine.activations.saved_tensors import SavedTensor, saved_tensors_to
from penstock.models.causal_lm import CausalLM
from penstock.models.layers.call_hook import CallHook


class SyncCopier:
    """Copies flat uint8 tensors synchronously. After `wait` for the returned event, the copy may be
    read and its source freed.

    If device memory is host memory it saves nothing, but shows what is moved.
    """

    def to_host(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        # Without copy a tensor on a CPU would be returned itself, and nothing be moved.
        return data.to("cpu", copy=True), None

    def to_device(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return data.clone(), None

    def wait(self, event: Any) -> None:
        """Make later computation wait for the copy."""


class StreamCopier(SyncCopier):
    """Copies on two CUDA streams, one per direction, overlapped with computation.

    Device memory always belongs to the compute stream: a copy begins when that stream reaches the
    request, and memory is freed only after that stream has waited.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._offloading = torch.cuda.Stream(device)
        self._fetching = torch.cuda.Stream(device)

    def to_host(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        # Pinned, because pageable memory is copied synchronously. Torch caches pinned memory.
        copy = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)
        return copy, self._copy_on(copy, data, self._offloading)

    def to_device(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        copy = torch.empty(data.shape, dtype=torch.uint8, device=self._device)
        return copy, self._copy_on(copy, data, self._fetching)

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def _copy_on(
        self, copy: torch.Tensor, data: torch.Tensor, stream: torch.cuda.Stream
    ) -> torch.cuda.Event:
        # For the memory of the copy as well: the allocator hands out what queued kernels still use.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            copy.copy_(data, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        return event


MIN_BYTES = 1024
"""Bytes. Smaller tensors stay: copying them takes as long as copying one of this size."""

# The autograd node of a change of dtype, by which autocast makes its copies of weights.
TO_COPY_NODE = "ToCopyBackward0"


@dataclass(eq=False)
class Group:
    """The tensors that one call of a layer saves."""

    before: "Group | None"
    """The group of the previous layer, which the backward pass needs next."""
    storages: "list[weakref.ref[OffloadedStorage]]" = field(default_factory=list)
    is_wanted: bool = False


class OffloadedStorage:
    """The bytes of one storage, alive as long as a graph needs any of them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.of = weakref.ref(storage)
        self.size = storage.nbytes()
        self.here: torch.Tensor | None = tensor
        """Any tensor on the device with this storage, or with a copy of it."""
        self.away: torch.Tensor | None = None
        self.version = tensor._version

    def on_device(self) -> torch.Tensor:
        assert self.here is not None
        # Autograd compares versions only of tensors that are saved without hooks.
        if self.here._version != self.version:
            raise RuntimeError(
                "a saved tensor was modified in place: it is at version "
                f"{self.here._version}, and was saved at version {self.version}"
            )
        return self.here


class ActivationOffloader:
    """Saves tensors of one device, of which `capacity` bytes stay there.

    An offloaded tensor keeps its device memory until two groups later, so up to two groups use
    extra memory; in the backward pass, the needed group and the next one.
    """

    def __init__(self, device: torch.device, copies: SyncCopier, *, capacity: int) -> None:
        self._device, self._copies, self._capacity = device, copies, capacity
        self._by_storage: weakref.WeakValueDictionary[int, OffloadedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._resident: dict[int, weakref.ref[OffloadedStorage]] = {}
        self._resident_bytes = 0
        # The copies of each group that are in progress, the newest group last.
        self._offloading: deque[list[tuple[weakref.ref[OffloadedStorage], Any]]] = deque([[]])
        self._fetching: list[tuple[torch.Tensor, Any]] = []
        self._newest: Group | None = None

    def start_group(self, scope: Literal["pass", "layer"]) -> Group:
        """Start a group for a layer call; `pass` marks the first layer of a forward pass."""
        self._newest = Group(self._newest if scope == "layer" else None)
        self._offloading.append([])
        while len(self._offloading) > 2:
            for ref, event in self._offloading.popleft():
                stored = ref()
                if stored is not None and stored.away is not None:
                    self._copies.wait(event)
                    stored.here = None
        return self._newest

    def pack(self, group: Group, tensor: torch.Tensor) -> SavedTensor:
        """Save a tensor in a group. Weights are not saved: they stay in memory anyway."""
        if not self._is_offloadable(tensor):
            stays = tensor.detach()
            return lambda: stays
        stored = self._get_storage(tensor.detach())
        group.storages.append(weakref.ref(stored))
        dtype, shape, stride = tensor.dtype, tensor.shape, tensor.stride()
        offset = int(tensor.storage_offset())

        def unpack() -> torch.Tensor:
            self._prefetch(group)
            on_device = stored.on_device()
            view = torch.empty(0, dtype=dtype, device=on_device.device)
            return view.set_(on_device.untyped_storage(), offset, shape, stride)

        return unpack

    def _is_offloadable(self, tensor: torch.Tensor) -> bool:
        return (
            # `set_` could not rebuild a subclass, such as a DTensor, from its bytes.
            type(tensor) in (torch.Tensor, FakeTensor)
            and tensor.device.type == self._device.type
            and tensor.untyped_storage().nbytes() >= MIN_BYTES
            and not _is_weight(tensor)
        )

    def _get_storage(self, tensor: torch.Tensor) -> OffloadedStorage:
        storage = tensor.untyped_storage()
        copy = self._by_storage.get(storage._cdata)
        # Another storage may have the key of one that was freed.
        if copy and copy.of() is storage and copy.version == tensor._version:
            return copy
        stored = OffloadedStorage(tensor)
        self._by_storage[storage._cdata] = stored
        self._keep_on_device(stored)
        return stored

    def _keep_on_device(self, stored: OffloadedStorage) -> None:
        number, size = id(stored), stored.size
        # When no graph needs the storage any more, it no longer counts as resident.
        ref = weakref.ref(stored, lambda _: self._forget_resident(number, size))
        self._resident[number] = ref
        self._resident_bytes += size
        while self._resident_bytes > self._capacity:
            oldest = next(iter(self._resident.values()))()
            assert oldest is not None
            self._forget_resident(id(oldest), oldest.size)
            on_device = oldest.on_device()
            data = torch.empty(0, dtype=torch.uint8, device=on_device.device)
            data.set_(on_device.untyped_storage())
            oldest.away, event = self._copies.to_host(data)
            self._offloading[-1].append((weakref.ref(oldest), event))

    def _forget_resident(self, number: int, size: int) -> None:
        if self._resident.pop(number, None):
            self._resident_bytes -= size

    def _prefetch(self, group: Group) -> None:
        if group.is_wanted:
            return
        group.is_wanted = True
        self._fetch(group)
        for _, event in self._fetching:
            self._copies.wait(event)
        self._fetching.clear()
        # Copied while the backward pass of this group is computed.
        if group.before:
            self._fetch(group.before)

    def _fetch(self, group: Group) -> None:
        for ref in group.storages:
            stored = ref()
            if stored is None:
                continue
            self._forget_resident(id(stored), stored.size)
            if stored.here is None:
                assert stored.away is not None
                stored.here, event = self._copies.to_device(stored.away)
                stored.version = stored.here._version
                # Kept here too: its memory must not be freed while it is written.
                self._fetching.append((stored.here, event))
            # Pinned memory is not reused before the copy ends: torch records an event in `copy_`.
            stored.away = None


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter, a view of one, or autocast's copy of one."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return True
    made_by = base.grad_fn
    if made_by is None or made_by.name() != TO_COPY_NODE:
        return False
    leaf = made_by.next_functions[0][0]
    return isinstance(getattr(leaf, "variable", None), nn.Parameter)


def build_offloader(device: torch.device, gigabytes: float) -> ActivationOffloader:
    """The offloader of this rank, with `gigabytes` of the newest activations left on the device."""
    copies = StreamCopier(device) if device.type == "cuda" else SyncCopier()
    return ActivationOffloader(device, copies, capacity=int(gigabytes * 1e9))


def offload(parts: Iterable[CausalLM], store: ActivationOffloader) -> None:
    """Offload the saved tensors of every layer of the model parts to `store`; in place.

    Hooks registered on `run_layer` before run inside: activation checkpointing then offloads the
    layer inputs. All parts on a rank, and all their micro-batches, share a store.
    """

    def run_offloaded(
        first: nn.Module | None, run: CallHook, module: nn.Module, *args: Any
    ) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return run(module, *args)
        group = store.start_group("pass" if module is first else "layer")
        with saved_tensors_to(partial(store.pack, group)):
            return run(module, *args)

    for part in parts:
        first = next(iter(part.blocks), None)
        part.run_layer = partial(run_offloaded, first, part.run_layer)
