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
from typing import Any, Literal, Protocol

import torch
from torch import nn

from penstock.engine.activations.saved_tensors import Kept, saved_tensors_to
from penstock.models.decoder import Decoder
from penstock.models.layers.call_hook import CallHook


class Copies(Protocol):
    """Copies flat uint8 tensors.

    After waiting for the returned handle, the copy may be read and its source freed.
    """

    def to_host(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Copy to host memory."""
        ...

    def to_device(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Copy back to the device."""
        ...

    def wait(self, copied: Any) -> None:
        """Make later computation wait for the copy."""
        ...


class StreamCopier:
    """Copies on two CUDA streams, one per direction, overlapped with computation.

    Device memory always belongs to the compute stream: a copy begins when that stream reaches the
    request, and memory is freed only after that stream has waited.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._leaving = torch.cuda.Stream(device)
        self._coming = torch.cuda.Stream(device)

    def to_host(self, data: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        # Pinned, because pageable memory is copied synchronously. Torch caches pinned memory.
        copy = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)
        return copy, self._copied(copy, data, self._leaving)

    def to_device(self, data: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        copy = torch.empty(data.shape, dtype=torch.uint8, device=self._device)
        return copy, self._copied(copy, data, self._coming)

    def wait(self, copied: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(copied)

    def _copied(
        self, copy: torch.Tensor, data: torch.Tensor, stream: torch.cuda.Stream
    ) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            copy.copy_(data, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(stream)
        return copied


class SyncCopier:
    """Copies synchronously.

    If device memory is host memory it saves nothing, but shows what is moved.
    """

    def to_host(self, data: torch.Tensor) -> tuple[torch.Tensor, None]:
        return data.to("cpu", copy=True), None

    def to_device(self, data: torch.Tensor) -> tuple[torch.Tensor, None]:
        return data.clone(), None

    def wait(self, copied: None) -> None:
        del copied


SMALLEST = 1024
"""Bytes. Smaller tensors stay: copying them takes as long as copying one of this size."""

CAST = "ToCopyBackward0"


@dataclass(eq=False)
class Group:
    """The tensors that one call of a layer saves."""

    before: "Group | None"
    """The group of the previous layer, which the backward pass needs next."""
    bundles: "list[weakref.ref[OffloadedStorage]]" = field(
        default_factory=list["weakref.ref[OffloadedStorage]"]
    )
    is_wanted: bool = False
    """Whether the backward pass has reached it."""


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
        """The tensor on the device, which must not have been modified."""
        assert self.here is not None
        if self.here._version != self.version:
            raise RuntimeError(
                "a tensor that the backward pass wants was changed in place: it is at version "
                f"{self.here._version}, and was kept at version {self.version}"
            )
        return self.here

    def data(self) -> torch.Tensor:
        """All bytes of the storage as a flat tensor."""
        storage = self.on_device().untyped_storage()
        data = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return data.set_(storage)


class ActivationOffloader:
    """Saves tensors of one device, of which `room` bytes stay there.

    An offloaded tensor keeps its device memory until two groups later, so up to two groups use
    extra memory; in the backward pass, the needed group and the next one.
    """

    def __init__(self, device: torch.device, copies: Copies, *, room: int) -> None:
        self._device, self._copies, self._room = device, copies, room
        self._known: weakref.WeakValueDictionary[int, OffloadedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._staying: dict[int, weakref.ref[OffloadedStorage]] = {}
        self._bytes_staying = 0
        self._leaving: deque[list[tuple[weakref.ref[OffloadedStorage], Any]]] = deque([[]])
        self._coming: list[tuple[torch.Tensor, Any]] = []
        self._newest: Group | None = None

    def start_group(self, what: Literal["pass", "layer"]) -> Group:
        """Start a group for a layer call; `pass` marks the first layer of a forward pass."""
        self._newest = Group(self._newest if what == "layer" else None)
        self._leaving.append([])
        while len(self._leaving) > 2:
            for kept, copied in self._leaving.popleft():
                bundle = kept()
                if bundle is not None and bundle.away is not None:
                    self._copies.wait(copied)
                    bundle.here = None
        return self._newest

    def pack(self, group: Group, tensor: torch.Tensor) -> Kept:
        """Save a tensor in a group. Weights are not saved: they stay in memory anyway."""
        if not self._is_offloadable(tensor):
            stays = tensor.detach()
            return lambda: stays
        bundle = self._bundle(tensor.detach())
        group.bundles.append(weakref.ref(bundle))
        dtype, shape, stride = tensor.dtype, tensor.shape, tensor.stride()
        offset = int(tensor.storage_offset())

        def given_back() -> torch.Tensor:
            self._prefetch(group)
            storage = bundle.on_device().untyped_storage()
            view = torch.empty(0, dtype=dtype, device=storage.device)
            return view.set_(storage, offset, shape, stride)

        return given_back

    def _is_offloadable(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.device.type == self._device.type
            and tensor.untyped_storage().nbytes() >= SMALLEST
            and not _is_weight(tensor)
        )

    def _bundle(self, tensor: torch.Tensor) -> OffloadedStorage:
        storage = tensor.untyped_storage()
        known = self._known.get(storage.data_ptr())
        # Another storage may have the address of one that was freed.
        if known and known.of() is storage and known.version == tensor._version:
            return known
        bundle = OffloadedStorage(tensor)
        self._known[storage.data_ptr()] = bundle
        self._keep_on_device(bundle)
        return bundle

    def _keep_on_device(self, bundle: OffloadedStorage) -> None:
        number, size = id(bundle), bundle.size

        def gone(_: Any) -> None:
            if self._staying.pop(number, None):
                self._bytes_staying -= size

        self._staying[number] = weakref.ref(bundle, gone)
        self._bytes_staying += size
        while self._bytes_staying > self._room:
            oldest = next(iter(self._staying.values()))()
            assert oldest is not None
            self._release_kept(oldest)
            oldest.away, copied = self._copies.to_host(oldest.data())
            self._leaving[-1].append((weakref.ref(oldest), copied))

    def _release_kept(self, bundle: OffloadedStorage) -> None:
        if self._staying.pop(id(bundle), None):
            self._bytes_staying -= bundle.size

    def _prefetch(self, group: Group) -> None:
        if group.is_wanted:
            return
        group.is_wanted = True
        self._fetch(group)
        for _, copied in self._coming:
            self._copies.wait(copied)
        self._coming.clear()
        if group.before:
            self._fetch(group.before)

    def _fetch(self, group: Group) -> None:
        """Bring all tensors of the group back to the device."""
        for kept in group.bundles:
            bundle = kept()
            if bundle is None:
                continue
            self._release_kept(bundle)
            if bundle.here is None:
                assert bundle.away is not None
                bundle.here, copied = self._copies.to_device(bundle.away)
                bundle.version = bundle.here._version
                # Kept here too: its memory must not be freed while it is written.
                self._coming.append((bundle.here, copied))
            bundle.away = None


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter, a view of one, or autocast's copy of one."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return True
    made_by = base.grad_fn
    if made_by is None or made_by.name() != CAST:
        return False
    leaf = made_by.next_functions[0][0]
    return isinstance(getattr(leaf, "variable", None), nn.Parameter)


def build_offloader(device: torch.device, gigabytes: float) -> ActivationOffloader:
    """The offloader of this rank, with `gigabytes` of the newest activations left on the device."""
    copies: Copies = StreamCopier(device) if device.type == "cuda" else SyncCopier()
    return ActivationOffloader(device, copies, room=int(gigabytes * 1e9))


def offload(parts: Iterable[Decoder], store: ActivationOffloader) -> None:
    """Offload the saved tensors of every layer of the model parts to `store`; in place.

    Hooks registered on `run_layer` before run inside: activation checkpointing then offloads the
    layer inputs. All parts on a rank, and all their micro-batches, share a store.
    """
    for part in parts:
        first = next(iter(part.model.layers.values()), None)
        part.run_layer = partial(_offloaded, store, first, part.run_layer)


def _offloaded(
    store: ActivationOffloader,
    first: nn.Module | None,
    run: CallHook,
    module: nn.Module,
    *args: Any,
) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return run(module, *args)
    group = store.start_group("pass" if module is first else "layer")
    with saved_tensors_to(partial(store.pack, group)):
        return run(module, *args)
