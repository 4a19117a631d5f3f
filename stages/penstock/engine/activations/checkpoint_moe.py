"""MoE activation checkpointing: recompute only the gated activation inside experts.

The rows that tokens sent to experts are saved, and so are the outputs: only the gate and up
projections and the activation are recomputed, from those rows, so no all-to-all is repeated. The
down projection is not recomputed either, because its result is not needed.

R rows, D model width, F features of an expert, E experts.
"""

import weakref
from functools import partial

import torch

from penstock.engine.activations.recompute_once import RecomputedCall, SavedTensors, SavedTensorSlot
from penstock.engine.activations.saved_tensors import SavedTensor, save_for_backward, unpack_hook
from penstock.models.layers.dropout import preserve_dropout_rng
from penstock.models.layers.experts import Experts, call_experts


def checkpoint_expert_gates(
    experts: Experts, x_RD: torch.Tensor, counts_E: torch.Tensor, /
) -> torch.Tensor:
    """Run both halves of `experts`; autograd saves only `x_RD` and the weights.

    The first backward pass that needs more recomputes the first half, which must save the same
    number of tensors each time.
    """
    if not torch.is_grad_enabled():
        return call_experts(experts, x_RD, counts_E)
    call = _Call(experts, x_RD, counts_E)
    with torch.autograd.graph.saved_tensors_hooks(call.pack_first_half, unpack_hook):
        inner_RF = experts.gate_up(x_RD, counts_E)
    call.record_first_half_output(inner_RF)
    with torch.autograd.graph.saved_tensors_hooks(call.pack_second_half, unpack_hook):
        return experts.down(inner_RF, counts_E)


class _Call(RecomputedCall):
    def __init__(self, experts: Experts, x_RD: torch.Tensor, counts_E: torch.Tensor) -> None:
        super().__init__(x_RD.device.type)
        # The dropout RNG may belong to another micro-batch by then.
        self._gated = preserve_dropout_rng(experts.gate_up)
        # Not the tensor itself, which would keep the graph before it alive.
        self._x_RD, self._requires_grad = save_for_backward(x_RD), x_RD.requires_grad
        self._counts_E = counts_E
        # Weak references: the graph alone keeps a slot, and with it a recomputed tensor, alive.
        self._places: list[weakref.ref[SavedTensorSlot] | None] = []
        # Slot, shape, stride, and the storage offset relative to the first half's output.
        self._results: list[
            tuple[weakref.ref[SavedTensorSlot], tuple[int, ...], tuple[int, ...], int]
        ] = []
        # Storage, dtype and storage offset of the first half's output.
        self._inner: tuple[int, torch.dtype, int] = 0, x_RD.dtype, 0
        # In memory until the backward pass anyway, so recomputing them would free nothing.
        resident = (x_RD, counts_E, *experts.parameters())
        self._resident_storages = {_storage_key(tensor) for tensor in resident}

    def pack_first_half(self, tensor: torch.Tensor) -> SavedTensor:
        """Pack hook: keep a tensor that is in memory anyway, else save an empty slot."""
        if _storage_key(tensor) in self._resident_storages:
            self._places.append(None)
            return save_for_backward(tensor)
        slot = SavedTensorSlot()
        self._places.append(weakref.ref(slot))
        return partial(self.unpack, slot)

    def record_first_half_output(self, inner_RF: torch.Tensor) -> None:
        # Not the tensor itself: the graph may hold this call's methods, and so the call.
        self._inner = _storage_key(inner_RF), inner_RF.dtype, int(inner_RF.storage_offset())

    def pack_second_half(self, tensor: torch.Tensor) -> SavedTensor:
        """Pack hook of the second half: only the first half's output, or its rows, gets a slot."""
        memory, dtype, offset = self._inner
        if _storage_key(tensor) != memory or tensor.dtype != dtype:
            return save_for_backward(tensor)
        slot = SavedTensorSlot()
        first = int(tensor.storage_offset()) - offset
        self._results.append((weakref.ref(slot), tensor.shape, tensor.stride(), first))
        return partial(self.unpack, slot)

    def _recompute(self) -> SavedTensors:
        saved = SavedTensors()
        recomputed: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            # Detached: an output saved by its own node would create a reference cycle.
            recomputed.append(tensor.detach())
            return recomputed[-1]

        # Gradients as the first time: autograd saves less for inputs without, and slots are matched
        # by their order.
        x_RD = self._x_RD().detach().requires_grad_(self._requires_grad)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.enable_grad(), self._autocast:
            inner_RF = self._gated(x_RD, self._counts_E)
        # Autograd packs tensors in the order of the operations, which is the same both times.
        for slot_ref, tensor in zip(self._places, recomputed, strict=True):
            if slot_ref and (slot := slot_ref()):
                saved[slot] = tensor
        inner_RF = inner_RF.detach()
        for result, shape, stride, first in self._results:
            if slot := result():
                offset = inner_RF.storage_offset() + first
                saved[slot] = inner_RF.as_strided(shape, stride, offset)
        return saved


def _storage_key(tensor: torch.Tensor) -> int:
    # Not the data pointer, which is 0 for every fake tensor of a dry run.
    return tensor.untyped_storage()._cdata
