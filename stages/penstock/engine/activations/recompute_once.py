"""Activation checkpointing for split backward passes (zero bubble): recompute only once.

Torch's checkpointing recomputes a layer in every backward pass that reaches it. A schedule that
computes weight gradients separately from activation gradients runs one pass for nearly each weight,
and so would recompute each layer half a dozen times.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from penstock.engine.activations.saved_tensors import SavedTensor, save_for_backward, unpack_hook


class SavedTensorSlot:
    """What the graph holds for a saved tensor: when the graph frees it, so does the call."""


class _RecomputedError(Exception):
    """All saved tensors are recomputed: stop early."""


SavedTensors = weakref.WeakKeyDictionary[SavedTensorSlot, torch.Tensor]


class RecomputedCall(ABC):
    """A call whose saved tensors are recomputed when a backward pass first needs one; they are kept
    until no backward pass can need them.
    """

    def __init__(self, device: str) -> None:
        self._saved: SavedTensors | None = None
        # A backward pass runs without autocast.
        dtype, is_enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self._autocast = torch.autocast(device, dtype=dtype, enabled=is_enabled)

    def unpack(self, slot: SavedTensorSlot) -> torch.Tensor:
        """The tensor of the slot."""
        if self._saved is None:
            self._saved = self._recompute()
        return self._saved[slot]

    @abstractmethod
    def _recompute(self) -> SavedTensors: ...


def checkpoint_once(run: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Run `run(*args)` without saving tensors; recompute them when a backward pass first needs one.

    `run` must save the same tensors each time, and must not use torch's random generators.
    """
    if not torch.is_grad_enabled():
        return run(*args)
    call = _Call(run, args)
    with torch.autograd.graph.saved_tensors_hooks(call.pack, unpack_hook):
        return run(*args)


class _Call(RecomputedCall):
    def __init__(self, run: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> None:
        super().__init__(next(arg.device.type for arg in args if isinstance(arg, torch.Tensor)))
        self._run = run
        self._args = [_Argument.of(arg) for arg in args]
        self._slots: list[weakref.ref[SavedTensorSlot]] = []

    def pack(self, _: torch.Tensor) -> SavedTensor:
        slot = SavedTensorSlot()
        self._slots.append(weakref.ref(slot))
        # Only the slots in the graph keep the call alive.
        return partial(self.unpack, slot)

    def _recompute(self) -> SavedTensors:
        saved = SavedTensors()
        slot_refs = iter(self._slots)
        num_missing = len(self._slots)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal num_missing
            # Detached: an output saved by its own node would create a reference cycle.
            tensor = tensor.detach()
            if slot := next(slot_refs)():
                saved[slot] = tensor
            num_missing -= 1
            if not num_missing:
                # As torch.utils.checkpoint stops early: nothing needs what comes after this.
                raise _RecomputedError
            return tensor

        args = [arg.detached() if isinstance(arg, _Argument) else arg for arg in self._args]
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        try:
            with hooks, torch.enable_grad(), self._autocast:
                self._run(*args)
        except _RecomputedError:
            pass
        assert not num_missing, "a call must save as many tensors the second time"
        return saved


@dataclass(frozen=True)
class _Argument:
    saved: SavedTensor
    wants_gradient: bool

    @staticmethod
    def of(arg: Any) -> Any:
        is_tensor = isinstance(arg, torch.Tensor)
        return _Argument(save_for_backward(arg), arg.requires_grad) if is_tensor else arg

    def detached(self) -> torch.Tensor:
        # Autograd saves less for inputs that need no gradient, and slots are matched by their
        # order.
        return self.saved().detach().requires_grad_(self.wants_gradient)
