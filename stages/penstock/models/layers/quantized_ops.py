"""Matmuls with quantized weights in compiled code.

The forward and the backward pass dequantize the weight with different operators. With one operator
the compiler would recognize both results as equal and keep the dequantized weight in memory between
the passes. Quantization noise is the same in both passes: the first operator returns the seed and
the step of its RNG, and the second one gets them.

T rows of x, N rows and K columns of a matrix; E experts.
"""

# pyright: reportIncompatibleMethodOverride=false

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from penstock.models.layers.dropout import DropoutRNG, current_dropout_rng, dropout_rng
from penstock.models.layers.module_registry import OpModule, module_by_id
from penstock_kernels.custom_op import operator

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes, scales and global scales, as uint8."""


class DequantizableModule(OpModule, ABC):
    """A quantized matrix that can be dequantized."""

    columns: int

    @abstractmethod
    def weight(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The weight of the current pass, in new memory."""


def linear(x_TK: torch.Tensor, op_id: torch.Tensor, tensors: Tensors, columns: int) -> torch.Tensor:
    """`x W^T` with the matrix that has this number, [T, N]."""
    return _QuantizedMatmul.apply(x_TK, None, op_id, *tensors, columns, None)


def group_linear(
    x_TK: torch.Tensor,
    counts_E: torch.Tensor,
    op_id: torch.Tensor,
    tensors: Tensors,
    columns: int,
    multiply: Multiply,
) -> torch.Tensor:
    """Grouped GEMM, [T, N]; rows are sorted by expert."""
    return _QuantizedMatmul.apply(x_TK, counts_E, op_id, *tensors, columns, multiply)


class _QuantizedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        counts_E: torch.Tensor | None,
        op_id: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        global_scales: torch.Tensor | None,
        columns: int,
        multiply: Multiply | None,
    ) -> torch.Tensor:
        weight, rng_state = _weight_op(op_id, codes, scales, global_scales, columns, x_TK.dtype)
        ctx.save_for_backward(counts_E, op_id, rng_state, codes, scales, global_scales)
        ctx.columns, ctx.multiply = columns, multiply
        if multiply is None or counts_E is None:
            return x_TK @ weight.mT
        return multiply(x_TK, weight, counts_E)

    @staticmethod
    def backward(ctx: Any, dy_TN: torch.Tensor) -> tuple[Any, ...]:
        counts_E, *saved = ctx.saved_tensors
        weight, nothing = _recompute_weight_op(*saved, ctx.columns, dy_TN.dtype), (None,) * 7
        if ctx.multiply is None:
            return dy_TN @ weight, *nothing
        return ctx.multiply(dy_TN, weight.mT, counts_E), *nothing


def _matrix(op_id: torch.Tensor) -> DequantizableModule:
    matrix = module_by_id(op_id)
    assert isinstance(matrix, DequantizableModule)
    return matrix


def _weight(
    op_id: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scales: torch.Tensor | None,
    columns: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight, and its RNG as int64 [has_rng, seed, step] on the CPU."""
    del columns
    rng = current_dropout_rng()
    rng_state = [0, 0, 0] if rng is None else [1, rng.seed, rng.step]
    weight = _matrix(op_id).weight((codes, scales, global_scales), dtype)
    return weight, torch.tensor(rng_state, device="cpu")


def _weight_fake(
    op_id: torch.Tensor, codes: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *_, columns, dtype = args
    weight = codes.new_empty((*codes.shape[:-1], columns), dtype=dtype)
    return weight, op_id.new_empty(3)


_weight_op = operator("quantized_weight", _weight, fake=_weight_fake)


def _recompute_weight(
    op_id: torch.Tensor,
    rng_state: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scales: torch.Tensor | None,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    del columns
    has_rng, seed, step = rng_state.tolist()
    # Noise has no tokens: its key follows from seed and step.
    rng = DropoutRNG(seed, step, rng_state[:0]) if has_rng else None
    with dropout_rng(rng):
        return _matrix(op_id).weight((codes, scales, global_scales), dtype)


def _recompute_weight_fake(
    op_id: torch.Tensor, rng_state: torch.Tensor, *args: Any
) -> torch.Tensor:
    del rng_state
    return _weight_fake(op_id, *args)[0]


_recompute_weight_op = operator(
    "quantized_weight_again", _recompute_weight, fake=_recompute_weight_fake
)
