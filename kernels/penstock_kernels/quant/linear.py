"""Layers with a frozen quantized matrix: they have a gradient for their input only.

T rows, K columns in, N out, G matrices. The dequantized matrix is not saved for the backward pass;
it is recomputed there.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock_kernels.group_gemm import group_gemm
from penstock_kernels.quant.formats import Format
from penstock_kernels.quant.operations import dequantize, matmul
from penstock_kernels.quant.quantized_tensor import QuantizedTensor

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
    y_TN = _multiply(x.reshape(-1, x.shape[-1]), quantized, None, None, change)
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
    return _multiply(x_TK, quantized, counts_G, multiply, change)


def _multiply(
    x_TK: torch.Tensor,
    quantized: QuantizedTensor,
    counts_G: torch.Tensor | None,
    multiply: GroupGemm | None,
    change: Change | None,
) -> torch.Tensor:
    # Autograd sees tensors, and what is none.
    tensors = quantized.codes, quantized.scales, quantized.global_scales
    kind = quantized.format, quantized.columns
    return _Linear.apply(x_TK, *tensors, counts_G, *kind, multiply, change)


class _Linear(torch.autograd.Function):
    """By one matrix, or with `multiply` by one of each group."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        global_scales: torch.Tensor | None,
        counts_G: Any,
        format: Format,
        columns: int,
        multiply: GroupGemm | None,
        change: Change | None,
    ) -> torch.Tensor:
        tensors = codes, scales, global_scales
        # Codes are saved, and not the weight: it is as large as a matrix that is not quantized.
        ctx.save_for_backward(*tensors, counts_G)
        ctx.format, ctx.columns, ctx.multiply, ctx.change = format, columns, multiply, change
        if multiply is not None:
            return multiply(x_TK, _weight(ctx, tensors, x_TK.dtype), counts_G)
        if change is None:
            return matmul(x_TK, QuantizedTensor(format, columns, *tensors))
        return x_TK @ _weight(ctx, tensors, x_TK.dtype).mT

    @staticmethod
    def backward(ctx: Any, dy_TN: torch.Tensor) -> tuple[Any, ...]:
        *tensors, counts_G = ctx.saved_tensors
        weight = _weight(ctx, tensors, dy_TN.dtype)
        multiply = ctx.multiply
        dx_TK = dy_TN @ weight if multiply is None else multiply(dy_TN, weight.mT, counts_G)
        return dx_TK, *[None] * 8


def _weight(ctx: Any, tensors: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    weight = dequantize(QuantizedTensor(ctx.format, ctx.columns, *tensors), dtype)
    return weight if ctx.change is None else ctx.change(weight)
