"""Where tensors wait for the backward pass: the newest on the device, the others in host memory.

What is kept is kept by storage: tensors that share memory are moved once, and tensors whose memory
is kept already are not moved again. A group is what one call of a layer keeps; groups leave and
come back as wholes, so that nothing but the order of calls must be known.
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
    """Copies flat tensors of bytes, uint8.

    A copy may be read, and what it was made of given away, by whoever has waited for what came with
    it.
    """

    def away(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy in the host's memory."""
        ...

    def back(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy of such a copy, on the device."""
        ...

    def wait(self, copied: Any) -> None:
        """Let nothing that is computed from here on begin before a copy is made."""
        ...


class StreamCopier:
    """Copies on streams of their own, one in each direction, while the device computes.

    Memory on the device is always that of the stream that computes: a copy begins only when that
    has come to where it was asked for, and nothing is given away before that has waited.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._leaving = torch.cuda.Stream(device)
        self._coming = torch.cuda.Stream(device)

    def away(self, data: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        # Memory that is not pinned is copied in turn. Torch keeps pinned memory for the next step.
        copy = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)
        return copy, self._copied(copy, data, self._leaving)

    def back(self, data: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
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
    """Copies at once. On a device whose memory is the host's it saves none, and shows what is moved
    where."""

    def away(self, data: torch.Tensor) -> tuple[torch.Tensor, None]:
        return data.to("cpu", copy=True), None

    def back(self, data: torch.Tensor) -> tuple[torch.Tensor, None]:
        return data.clone(), None

    def wait(self, copied: None) -> None:
        del copied


SMALLEST = 1024
"""Bytes. What is smaller stays: a copy of it takes as long as one of this size."""

CAST = "ToCopyBackward0"


@dataclass(eq=False)
class Group:
    """What one call of a layer keeps."""

    before: "Group | None"
    """That of the layer before, which the backward pass will want next."""
    bundles: "list[weakref.ref[OffloadedStorage]]" = field(
        default_factory=list["weakref.ref[OffloadedStorage]"]
    )
    is_wanted: bool = False
    """Whether the backward pass has come to it."""


class OffloadedStorage:
    """The bytes of one storage. It lives as long as a graph wants any of them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.of = weakref.ref(storage)
        self.size = storage.nbytes()
        self.here: torch.Tensor | None = tensor
        """Any tensor on the device with this storage, or with a copy of it."""
        self.away: torch.Tensor | None = None
        self.version = tensor._version

    def on_device(self) -> torch.Tensor:
        """What is here, which nobody may have written to."""
        assert self.here is not None
        if self.here._version != self.version:
            raise RuntimeError(
                "a tensor that the backward pass wants was changed in place: it is at version "
                f"{self.here._version}, and was kept at version {self.version}"
            )
        return self.here

    def data(self) -> torch.Tensor:
        """All bytes that are here, flat."""
        storage = self.on_device().untyped_storage()
        data = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return data.set_(storage)


class ActivationOffloader:
    """Keeps tensors of one device, of which `room` bytes stay there.

    A tensor that leaves holds its memory on the device until two groups later, so at most two
    groups' worth is there besides; and on the way back, the group that is wanted and the next one.
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

    def begin(self, what: Literal["pass", "layer"]) -> Group:
        """A group for the call of a layer that begins; with a `pass`, of the first of one."""
        self._newest = Group(self._newest if what == "layer" else None)
        self._leaving.append([])
        while len(self._leaving) > 2:
            for kept, copied in self._leaving.popleft():
                bundle = kept()
                if bundle is not None and bundle.away is not None:
                    self._copies.wait(copied)
                    bundle.here = None
        return self._newest

    def keep(self, group: Group, tensor: torch.Tensor) -> Kept:
        """Keep a tensor in a group. Weights are not kept: they are there anyway."""
        if not self._moves(tensor):
            stays = tensor.detach()
            return lambda: stays
        bundle = self._bundle(tensor.detach())
        group.bundles.append(weakref.ref(bundle))
        dtype, shape, stride = tensor.dtype, tensor.shape, tensor.stride()
        offset = int(tensor.storage_offset())

        def given_back() -> torch.Tensor:
            self._want(group)
            storage = bundle.on_device().untyped_storage()
            view = torch.empty(0, dtype=dtype, device=storage.device)
            return view.set_(storage, offset, shape, stride)

        return given_back

    def _moves(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.device.type == self._device.type
            and tensor.untyped_storage().nbytes() >= SMALLEST
            and not _is_weight(tensor)
        )

    def _bundle(self, tensor: torch.Tensor) -> OffloadedStorage:
        storage = tensor.untyped_storage()
        known = self._known.get(storage.data_ptr())
        # Another storage may lie where one was that has gone.
        if known and known.of() is storage and known.version == tensor._version:
            return known
        bundle = OffloadedStorage(tensor)
        self._known[storage.data_ptr()] = bundle
        self._stay(bundle)
        return bundle

    def _stay(self, bundle: OffloadedStorage) -> None:
        number, size = id(bundle), bundle.size

        def gone(_: Any) -> None:
            if self._staying.pop(number, None):
                self._bytes_staying -= size

        self._staying[number] = weakref.ref(bundle, gone)
        self._bytes_staying += size
        while self._bytes_staying > self._room:
            oldest = next(iter(self._staying.values()))()
            assert oldest is not None
            self._stay_no_longer(oldest)
            oldest.away, copied = self._copies.away(oldest.data())
            self._leaving[-1].append((weakref.ref(oldest), copied))

    def _stay_no_longer(self, bundle: OffloadedStorage) -> None:
        if self._staying.pop(id(bundle), None):
            self._bytes_staying -= bundle.size

    def _want(self, group: Group) -> None:
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
        """Let all that the group keeps be on the device until it goes."""
        for kept in group.bundles:
            bundle = kept()
            if bundle is None:
                continue
            self._stay_no_longer(bundle)
            if bundle.here is None:
                assert bundle.away is not None
                bundle.here, copied = self._copies.back(bundle.away)
                bundle.version = bundle.here._version
                # Held here too: its memory must not be given away while it is written.
                self._coming.append((bundle.here, copied))
            bundle.away = None


def _is_weight(tensor: torch.Tensor) -> bool:
    """A parameter, a view of one, or what autocast made of one."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return True
    made_by = base.grad_fn
    if made_by is None or made_by.name() != CAST:
        return False
    leaf = made_by.next_functions[0][0]
    return isinstance(getattr(leaf, "variable", None), nn.Parameter)


def build_offloader(device: torch.device, gigabytes: float) -> ActivationOffloader:
    """Where the activations of this rank wait, but for so many gigabytes, the newest ones."""
    copies: Copies = StreamCopier(device) if device.type == "cuda" else SyncCopier()
    return ActivationOffloader(device, copies, room=int(gigabytes * 1e9))


def offload(parts: Iterable[Decoder], store: ActivationOffloader) -> None:
    """Let every layer of a model's parts keep in `store` what it keeps; in place.

    What was plugged into `run_layer` before is called within: recomputation, which then keeps the
    layer's input there. All parts on a rank, and all their micro-batches, share a store.
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
    group = store.begin("pass" if module is first else "layer")
    with saved_tensors_to(partial(store.keep, group)):
        return run(module, *args)
