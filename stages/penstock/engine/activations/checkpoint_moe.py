"""Recomputation of what experts compute between their two products, and of nothing else.

The rows that tokens sent to experts are kept, and so is what came back of them: only the gate and
up products and the activation are computed again, from those rows, so no row travels twice. The
second product is not repeated either, as nothing is wanted of its result.

R rows, D model width, F features of an expert, E experts.
"""

import weakref
from collections.abc import Callable
from functools import partial

import torch

from penstock.engine.activations.recompute_once import SavedTensorSlot, casting_as_now
from penstock.engine.activations.saved_tensors import Kept, save_for_backward, unpack_hook
from penstock.models.layers.call_hook import CallHook
from penstock.models.layers.dropout import preserve_dropout_rng
from penstock.models.layers.experts import Experts, call_experts
from penstock.models.layers.moe import MoE


def checkpoint_moe_act(mixture: MoE, again: Callable[..., torch.Tensor]) -> None:
    """Plug it into a mixture, in place. `again` recomputes a whole module: the shared experts,
    which hear of no other rank."""
    mixture.experts.run = checkpoint_expert_gates
    shared: CallHook = partial(again, mixture.run_shared)
    mixture.run_shared = shared


def checkpoint_expert_gates(
    experts: Experts, x_RD: torch.Tensor, counts_E: torch.Tensor, /
) -> torch.Tensor:
    """Both halves of `experts`, of which the graph keeps `x_RD` and the weights.

    The first backward pass that wants more computes the first half again; what it then saves is
    kept until no backward pass can want it. The half must save as many tensors each time.
    """
    if not torch.is_grad_enabled():
        return call_experts(experts, x_RD, counts_E)
    call = _Call(experts, x_RD, counts_E)
    with torch.autograd.graph.saved_tensors_hooks(call.of_first_half, unpack_hook):
        inner_RF = experts.gated(x_RD, counts_E)
    call.gave(inner_RF)
    with torch.autograd.graph.saved_tensors_hooks(call.of_second_half, unpack_hook):
        return experts.down(inner_RF, counts_E)


class _Call:
    """One call: what it needs to compute its first half again, and what that then saves."""

    def __init__(self, experts: Experts, x_RD: torch.Tensor, counts_E: torch.Tensor) -> None:
        # What is drawn from may be another micro-batch's by then.
        self._gated = preserve_dropout_rng(experts.gated)
        # Not the tensor itself, which would hold the graph of all that came before it.
        self._x_RD, self._wanted = save_for_backward(x_RD), x_RD.requires_grad
        self._counts_E = counts_E
        self._places: list[weakref.ref[SavedTensorSlot] | None] = []
        self._results: list[
            tuple[weakref.ref[SavedTensorSlot], tuple[int, ...], tuple[int, ...], int]
        ] = []
        self._saved: weakref.WeakKeyDictionary[SavedTensorSlot, torch.Tensor] | None = None
        self._inner: tuple[int, torch.dtype, int] = 0, x_RD.dtype, 0
        self._casting = casting_as_now(x_RD.device.type)
        there = (x_RD, counts_E, *experts.parameters())
        self._there = {_memory_of(tensor) for tensor in there}

    def of_first_half(self, tensor: torch.Tensor) -> Kept:
        """A tensor that is saved: kept where it is there anyway, else a slot for it."""
        if _memory_of(tensor) in self._there:
            self._places.append(None)
            return save_for_backward(tensor)
        slot = SavedTensorSlot()
        self._places.append(weakref.ref(slot))
        return partial(self._saved_in, slot)

    def gave(self, inner_RF: torch.Tensor) -> None:
        """The first half has ended with this, which is held by whoever calls the second one."""
        # Not the tensor itself: the graph may hold on to this call's methods, and so to it.
        self._inner = _memory_of(inner_RF), inner_RF.dtype, int(inner_RF.storage_offset())

    def of_second_half(self, tensor: torch.Tensor) -> Kept:
        """The same: here only what the first half gave, or some rows of it, is not there anyway."""
        memory, dtype, offset = self._inner
        if _memory_of(tensor) != memory or tensor.dtype != dtype:
            return save_for_backward(tensor)
        slot = SavedTensorSlot()
        first = int(tensor.storage_offset()) - offset
        self._results.append((weakref.ref(slot), tensor.shape, tensor.stride(), first))
        return partial(self._saved_in, slot)

    def _saved_in(self, slot: SavedTensorSlot) -> torch.Tensor:
        """In a backward pass: the tensor that was saved."""
        if self._saved is None:
            self._saved = self._computed_again()
        return self._saved[slot]

    def _computed_again(self) -> weakref.WeakKeyDictionary[SavedTensorSlot, torch.Tensor]:
        saved: weakref.WeakKeyDictionary[SavedTensorSlot, torch.Tensor] = (
            weakref.WeakKeyDictionary()
        )
        found: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            # Detached: an output that a node saves would hold the node that holds it.
            found.append(tensor.detach())
            return found[-1]

        x_RD = self._x_RD().detach().requires_grad_(self._wanted)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.enable_grad(), self._casting:
            inner_RF = self._gated(x_RD, self._counts_E)
        for place, tensor in zip(self._places, found, strict=True):
            if place and (slot := place()):
                saved[slot] = tensor
        inner_RF = inner_RF.detach()
        for result, shape, stride, first in self._results:
            if slot := result():
                at = inner_RF.storage_offset() + first
                saved[slot] = inner_RF.as_strided(shape, stride, at)
        return saved


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
