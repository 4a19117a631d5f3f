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

from penstock.models.layers.dropout import DropoutRNG, current_noise, dropout_rng
from penstock.models.layers.module_registry import OpModule, numbered
from penstock_kernels.custom_op import operator

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes, scales and global scales, as uint8."""


class Dequantizes(OpModule, ABC):
    """A quantized matrix that can be dequantized."""

    columns: int

    @abstractmethod
    def weight(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The weight of the current pass, in new memory."""


def linear(
    x_TK: torch.Tensor, number: torch.Tensor, tensors: Tensors, columns: int
) -> torch.Tensor:
    """`x W^T` with the matrix that has this number, [T, N]."""
    return _Product.apply(x_TK, None, number, *tensors, columns, None)


def group_linear(
    x_TK: torch.Tensor,
    counts_E: torch.Tensor,
    number: torch.Tensor,
    tensors: Tensors,
    columns: int,
    multiply: Multiply,
) -> torch.Tensor:
    """Grouped GEMM, [T, N]; rows are sorted by expert."""
    return _Product.apply(x_TK, counts_E, number, *tensors, columns, multiply)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        counts_E: torch.Tensor | None,
        number: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        global_scales: torch.Tensor | None,
        columns: int,
        multiply: Multiply | None,
    ) -> torch.Tensor:
        weight, drawn = _weight_of(number, codes, scales, global_scales, columns, x_TK.dtype)
        ctx.save_for_backward(counts_E, number, drawn, codes, scales, global_scales)
        ctx.columns, ctx.multiply = columns, multiply
        if multiply is None or counts_E is None:
            return x_TK @ weight.mT
        return multiply(x_TK, weight, counts_E)

    @staticmethod
    def backward(ctx: Any, dy_TN: torch.Tensor) -> tuple[Any, ...]:
        counts_E, *kept = ctx.saved_tensors
        weight, nothing = _weight_again_of(*kept, ctx.columns, dy_TN.dtype), (None,) * 7
        if ctx.multiply is None:
            return dy_TN @ weight, *nothing
        return ctx.multiply(dy_TN, weight.mT, counts_E), *nothing


def _matrix(number: torch.Tensor) -> Dequantizes:
    matrix = numbered(number)
    assert isinstance(matrix, Dequantizes)
    return matrix


def _weight(
    number: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scales: torch.Tensor | None,
    columns: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight, and its RNG as int64 [has_rng, seed, step] on the CPU."""
    del columns
    noise = current_noise()
    drawn = [0, 0, 0] if noise is None else [1, noise.seed, noise.step]
    weight = _matrix(number).weight((codes, scales, global_scales), dtype)
    return weight, torch.tensor(drawn, device="cpu")


def _weight_fake(
    number: torch.Tensor, codes: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *_, columns, dtype = others
    weight = codes.new_empty((*codes.shape[:-1], columns), dtype=dtype)
    return weight, number.new_empty(3)


_weight_of = operator("quantized_weight", _weight, fake=_weight_fake)


def _weight_again(
    number: torch.Tensor,
    drawn: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scales: torch.Tensor | None,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    del columns
    was_drawn, seed, step = drawn.tolist()
    noise = DropoutRNG(seed, step, drawn[:0]) if was_drawn else None
    with dropout_rng(noise):
        return _matrix(number).weight((codes, scales, global_scales), dtype)


def _weight_again_fake(number: torch.Tensor, drawn: torch.Tensor, *others: Any) -> torch.Tensor:
    del drawn
    return _weight_fake(number, *others)[0]


_weight_again_of = operator("quantized_weight_again", _weight_again, fake=_weight_again_fake)
