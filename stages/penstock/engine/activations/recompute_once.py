"""Recomputation for a backward pass in several: what is computed again is computed once.

Torch's own computes a layer again in every backward pass that reaches it. A schedule that computes
the gradients of weights apart from those of activations makes one pass for nearly each weight, and
so would compute each layer half a dozen times.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engine.activations.saved_tensors import Kept, save_for_backward


class SavedTensorSlot:
    """What the graph keeps in the place of a saved tensor. When the graph lets go of it, so does
    the call."""


class _EnoughError(Exception):
    """All that was saved is there again: what follows need not be computed."""


def checkpoint_once(run: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """`run(*args)`, whose saved tensors are not kept, but computed again when a backward pass first
    wants one, and then kept until none can want them any more.

    `run` must save the same tensors each time, and draw nothing from torch's generators.
    """
    if not torch.is_grad_enabled():
        return run(*args)
    call = _Call(run, args)
    with torch.autograd.graph.saved_tensors_hooks(call.leave_out, call.get):
        return run(*args)


class _Call:
    """One call: its arguments, and what it saved once it is computed again."""

    def __init__(self, run: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> None:
        self._run = run
        self._args = [_Argument.of(arg) for arg in args]
        self._slots: list[weakref.ref[SavedTensorSlot]] = []
        self._saved: weakref.WeakKeyDictionary[SavedTensorSlot, torch.Tensor] | None = None
        device = next(arg.device.type for arg in args if isinstance(arg, torch.Tensor))
        self._casting = casting_as_now(device)

    def leave_out(self, _: torch.Tensor) -> tuple["_Call", SavedTensorSlot]:
        """In the forward pass: a slot for the tensor."""
        slot = SavedTensorSlot()
        self._slots.append(weakref.ref(slot))
        # The graph holds on to the call through its slots, and nothing else does.
        return self, slot

    @staticmethod
    def get(left: tuple["_Call", SavedTensorSlot]) -> torch.Tensor:
        """In a backward pass: the tensor of the slot."""
        call, slot = left
        if call._saved is None:
            call._saved = call._computed_again()
        return call._saved[slot]

    def _computed_again(self) -> weakref.WeakKeyDictionary[SavedTensorSlot, torch.Tensor]:
        saved: weakref.WeakKeyDictionary[SavedTensorSlot, torch.Tensor] = (
            weakref.WeakKeyDictionary()
        )
        place = iter(self._slots)
        left = len(self._slots)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal left
            # Detached: an output that a node saves would hold the node that holds it.
            tensor = tensor.detach()
            if slot := next(place)():
                saved[slot] = tensor
            left -= 1
            if not left:
                raise _EnoughError
            return tensor

        args = [arg.again() if isinstance(arg, _Argument) else arg for arg in self._args]
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        try:
            with hooks, torch.enable_grad(), self._casting:
                self._run(*args)
        except _EnoughError:
            pass
        assert not left, "a call must save as many tensors the second time"
        return saved


def casting_as_now(device: str) -> torch.autocast:
    """What casts later as it is done now: a backward pass runs where nothing is cast."""
    dtype = torch.get_autocast_dtype(device)
    return torch.autocast(device, dtype=dtype, enabled=torch.is_autocast_enabled(device))


@dataclass(frozen=True)
class _Argument:
    """A tensor that a call was given."""

    kept: Kept
    wants_gradient: bool

    @staticmethod
    def of(arg: Any) -> Any:
        return (
            _Argument(save_for_backward(arg), arg.requires_grad)
            if isinstance(arg, torch.Tensor)
            else arg
        )

    def again(self) -> torch.Tensor:
        """One that is differentiated like it, and no further."""
        return self.kept().detach().requires_grad_(self.wants_gradient)
