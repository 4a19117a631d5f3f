"""Counts what each layer of a transformers model saves for its backward pass, with fake tensors.

T tokens of one document, N query heads, K key heads, H head dimension.
"""

# pyright: reportIncompatibleMethodOverride=false

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.models.automodel.attention import attention_over
from penstock.models.automodel.inputs import accepted
from penstock.models.automodel.outline import SavedBytes
from penstock_kernels.attention import VarlenMetadata

# Documents from which the part that grows with the square of their length follows.
LENGTHS = (64, 128)

# After this time the mean of the layers so far is taken for the others.
SECONDS = 3.0


def saved_activations(
    build: Callable[[], Any], layers: Sequence[str]
) -> dict[str, tuple[SavedBytes, ...]]:
    """What each layer saves, by the dtype of the model; empty for a model that needs values.

    `build` makes the model on the meta device.
    """
    saved: dict[str, tuple[SavedBytes, ...]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = build().to(dtype)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), _portable_experts():
                model.to_empty(device="cpu")
                short, long = (_count(model, layers, length) for length in LENGTHS)
        except Exception:  # noqa: BLE001 - what a model does with values is not known
            return {}
        name = str(dtype).removeprefix("torch.")
        saved[name] = tuple(map(_fit, short, long))
    return saved


@contextmanager
def _portable_experts() -> Iterator[None]:
    # Context manager: grouped matmuls by the operation of transformers, whose shapes are known in
    # every dtype.
    from transformers.integrations import moe  # noqa: PLC0415

    before = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *_, **__: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = before


def _fit(short: int, long: int) -> SavedBytes:
    # The two coefficients of `a T + b T^2`.
    first, second = LENGTHS
    pair = max(0.0, (long / second - short / first) / (second - first))
    return SavedBytes(round(short / first - pair * first, 1), round(pair, 3))


class _OutOfTimeError(Exception):
    """The layers so far stand for the others."""


def _count(model: Any, layers: Sequence[str], length: int) -> list[int]:
    end = time.monotonic() + SECONDS
    # By the address of the storage's object: fake tensors have no memory, so no data_ptr.
    storages = {
        tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())
    }
    handles, counts = [], list[int]()
    held: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if counts and storage._cdata not in storages:
            storages.add(storage._cdata)
            # Kept, so that no other storage gets its address.
            held.append(storage)
            counts[-1] += storage.nbytes()
        return tensor

    def begin(*_: Any) -> None:
        if len(counts) > 1 and time.monotonic() > end:
            raise _OutOfTimeError
        counts.append(0)

    for name in layers:
        layer: nn.Module = model.get_submodule(name)
        handles.append(layer.register_forward_pre_hook(begin))
    base = model.base_model
    ids_1L = torch.zeros(1, length, dtype=torch.int64)
    try:
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            attention_over(
                VarlenMetadata.of([length]), lambda q, k, v, *_: _Attention.apply(q, k, v)
            ),
            suppress(_OutOfTimeError),
        ):
            base(input_ids=ids_1L, **accepted(base, {"use_cache": False}))
    finally:
        for handle in handles:
            handle.remove()
    if len(counts) > len(layers):
        raise ValueError(f"{len(counts)} layers ran, of {len(layers)}")
    mean = sum(counts) // max(1, len(counts))
    return counts + [mean] * (len(layers) - len(counts))


class _Attention(torch.autograd.Function):
    """Saves what a fused attention does: its inputs, its output and the softmax's denominators."""

    @staticmethod
    def forward(
        ctx: Any, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor:
        y_TNH = torch.empty_like(q_TNH)
        sums_TN = y_TNH.new_empty(y_TNH.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH, y_TNH, sums_TN)
        return y_TNH

    @staticmethod
    def backward(ctx: Any, dy_TNH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        del dy_TNH
        q_TNH, k_TKH, v_TKH, *_ = ctx.saved_tensors
        return torch.empty_like(q_TNH), torch.empty_like(k_TKH), torch.empty_like(v_TKH)
