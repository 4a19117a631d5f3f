"""Activation checkpointing for split backward passes (zero bubble): recompute only once.

Torch's checkpointing recomputes a layer in every backward pass that reaches it. A schedule that
computes weight gradients separately from activation gradients runs one pass for nearly each weight,
and so would recompute each layer half a dozen times.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engine.activations.saved_tensors import SavedTensor, save_for_backward


class SavedTensorSlot:
    """What the graph holds for a saved tensor: when the graph frees it, so does the call."""


class _RecomputedError(Exception):
    """All saved tensors are recomputed: stop early."""


def checkpoint_once(run: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Run `run(*args)` without saving tensors; recompute them when a backward pass first needs one.

    Recomputed tensors are kept until no backward pass can need them. `run` must save the same
    tensors each time, and must not use torch's random generators.
    """
    if not torch.is_grad_enabled():
        return run(*args)
    call = _Call(run, args)
    with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
        return run(*args)


class _Call:
    """One call: its arguments, and its saved tensors once recomputed."""

    def __init__(self, run: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> None:
        self._run = run
        self._args = [_Argument.of(arg) for arg in args]
        self._slots: list[weakref.ref[SavedTensorSlot]] = []
        self._saved: weakref.WeakKeyDictionary[SavedTensorSlot, torch.Tensor] | None = None
        device = next(arg.device.type for arg in args if isinstance(arg, torch.Tensor))
        self._autocast = current_autocast(device)

    def pack(self, _: torch.Tensor) -> tuple["_Call", SavedTensorSlot]:
        slot = SavedTensorSlot()
        self._slots.append(weakref.ref(slot))
        # Only the slots in the graph keep the call alive.
        return self, slot

    @staticmethod
    def unpack(packed: tuple["_Call", SavedTensorSlot]) -> torch.Tensor:
        call, slot = packed
        if call._saved is None:
            call._saved = call._recompute()
        return call._saved[slot]

    def _recompute(self) -> weakref.WeakKeyDictionary[SavedTensorSlot, torch.Tensor]:
        saved: weakref.WeakKeyDictionary[SavedTensorSlot, torch.Tensor] = (
            weakref.WeakKeyDictionary()
        )
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


def current_autocast(device: str) -> torch.autocast:
    """The current autocast state, for later: a backward pass runs without autocast."""
    dtype = torch.get_autocast_dtype(device)
    return torch.autocast(device, dtype=dtype, enabled=torch.is_autocast_enabled(device))


@dataclass(frozen=True)
class _Argument:
    saved: SavedTensor
    wants_gradient: bool

    @staticmethod
    def of(arg: Any) -> Any:
        is_tensor = isinstance(arg, torch.Tensor)
        return _Argument(save_for_backward(arg), arg.requires_grad) if is_tensor else arg

    def detached(self) -> torch.Tensor:
        return self.saved().detach().requires_grad_(self.wants_gradient)
