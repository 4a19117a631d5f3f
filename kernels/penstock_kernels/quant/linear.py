"""Layers with a frozen quantized matrix: they have a gradient for their input only.

T rows, K columns in, N out, G matrices. The dequantized matrix is not saved for the backward pass;
it is recomputed there.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable
from typing import Any

import torch

from penstock_kernels.group_gemm import group_gemm
from penstock_kernels.quant.formats import Format
from penstock_kernels.quant.operations import dequantize, matmul
from penstock_kernels.quant.quantized_tensor import QuantizedTensor

__all__ = ["Change", "GroupGemm", "group_linear", "linear"]

Change = Callable[[torch.Tensor], torch.Tensor]
"""Makes of the dequantized weight the one that is used, such as by noise, in place if it likes;
called once forward and once backward, and must give the same."""

GroupGemm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def linear(
    x: torch.Tensor, quantized: QuantizedTensor, change: Change | None = None
) -> torch.Tensor:
    """`x W^T`, [..., N], of x [..., K] in its dtype; few rows without dequantizing all of W.

    Raises:
        ValueError: W is not one matrix, or x has other columns.
    """
    if len(quantized.shape) != 2 or x.shape[-1] != quantized.columns:
        raise ValueError(f"x is {tuple(x.shape)}, and the matrix {quantized.shape}")
    y_TN = _Linear.apply(x.reshape(-1, x.shape[-1]), *_parts(quantized), change)
    return y_TN.unflatten(0, x.shape[:-1])


def group_linear(
    x_TK: torch.Tensor,
    quantized: QuantizedTensor,
    counts_G: torch.Tensor,
    multiply: GroupGemm = group_gemm,
    change: Change | None = None,
) -> torch.Tensor:
    """Rows of x, sorted by group, each by its group's matrix of [G, N, K]: [T, N].

    multiply is group_gemm, or one of its backends.
    """
    return _GroupLinear.apply(x_TK, counts_G, *_parts(quantized), multiply, change)


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Format, int]


def _parts(quantized: QuantizedTensor) -> _Parts:
    """What autograd sees: tensors, and what is none."""
    return (
        quantized.codes,
        quantized.scales,
        quantized.global_scales,
        quantized.format,
        quantized.columns,
    )


def _weight(ctx: Any, tensors: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
    weight = dequantize(QuantizedTensor(ctx.format, ctx.columns, *tensors), dtype)
    return weight if ctx.change is None else ctx.change(weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        global_scales: torch.Tensor | None,
        format: Format,
        columns: int,
        change: Change | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales, global_scales)
        ctx.format, ctx.columns, ctx.change = format, columns, change
        if change is None:
            return matmul(x_TK, QuantizedTensor(format, columns, codes, scales, global_scales))
        return x_TK @ _weight(ctx, (codes, scales, global_scales), x_TK.dtype).mT

    @staticmethod
    def backward(ctx: Any, dy_TN: torch.Tensor) -> tuple[Any, ...]:
        dx_TK = dy_TN @ _weight(ctx, ctx.saved_tensors, dy_TN.dtype)
        return dx_TK, None, None, None, None, None, None


class _GroupLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        counts_G: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        global_scales: torch.Tensor | None,
        format: Format,
        columns: int,
        multiply: GroupGemm,
        change: Change | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(counts_G, codes, scales, global_scales)
        ctx.format, ctx.columns, ctx.change = format, columns, change
        ctx.multiply = multiply
        weight_GNK = _weight(ctx, (codes, scales, global_scales), x_TK.dtype)
        return multiply(x_TK, weight_GNK, counts_G)

    @staticmethod
    def backward(ctx: Any, dy_TN: torch.Tensor) -> tuple[Any, ...]:
        counts_G, *tensors = ctx.saved_tensors
        weight_GNK = _weight(ctx, tuple(tensors), dy_TN.dtype)
        dx_TK = ctx.multiply(dy_TN, weight_GNK.mT, counts_G)
        return dx_TK, None, None, None, None, None, None, None, None
