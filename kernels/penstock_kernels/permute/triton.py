"""permute and unpermute on Triton: tokens are copied, weighted and summed in one pass.

T tokens, K copies of each, R rows, D columns. The gradient of copying is summing, and that of
summing is copying. Each result is written by one program, which reads its inputs by the order or
its inverse: nothing is added atomically, so results are deterministic.
"""

# pyright: reportArgumentType=false, reportReturnType=false

from typing import Any

import torch
import triton
import triton.language as tl

from penstock_kernels.custom_op import keep_inputs, operator
from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.permute.reference import Order

WIDEST = 2048
"""Columns that a program holds at a time."""


@triton.jit
def _copy(x_ptr, copy_of_row_ptr, rows_ptr, K, D, BLOCK: tl.constexpr):
    """A row of a token, zeros for rows without a token."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    copy = tl.load(copy_of_row_ptr + row)
    # The row of no copy would begin before the memory: nothing is read, and zeros are stored.
    width = tl.where(copy >= 0, D, 0)
    x = tl.load(x_ptr + copy // K * D + offs, mask=offs < width, other=0)
    tl.store(rows_ptr + row * D + offs, x, mask=offs < D)


@triton.jit
def _add(
    rows_ptr, row_of_copy_ptr, weights_ptr, y_ptr, K, D, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum of a token's rows, in fp32 in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(0, K):
        row = tl.load(row_of_copy_ptr + token * K + k)
        width = tl.where(row >= 0, D, 0)
        values = tl.load(rows_ptr + row * D + offs, mask=offs < width, other=0)
        values = values.to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights_ptr + token * K + k).to(tl.float32)
        total += values
    tl.store(y_ptr + token * D + offs, total, mask=offs < D)


@triton.jit
def _weigh(
    dy_ptr,
    rows_ptr,
    weights_ptr,
    copy_of_row_ptr,
    drows_ptr,
    dweights_ptr,
    K,
    D,
    BLOCK: tl.constexpr,
):
    """For one row: its gradient, `weight * dy`, and its weight's, `dy . row`."""
    row = tl.program_id(0).to(tl.int64)
    copy = tl.load(copy_of_row_ptr + row)
    width = tl.where(copy >= 0, D, 0)
    weight = tl.load(weights_ptr + copy, mask=copy >= 0, other=0).to(tl.float32)
    product = tl.zeros([BLOCK], dtype=tl.float32)
    for column in range(0, D, BLOCK):
        offs = column + tl.arange(0, BLOCK)
        dy = tl.load(dy_ptr + copy // K * D + offs, mask=offs < width, other=0).to(tl.float32)
        values = tl.load(rows_ptr + row * D + offs, mask=offs < width, other=0).to(tl.float32)
        product += dy * values
        tl.store(drows_ptr + row * D + offs, dy * weight, mask=offs < D)
    tl.store(dweights_ptr + copy, tl.sum(product, axis=0), mask=copy >= 0)


def _block(D: int) -> int:
    return min(next_power_of_2(D), WIDEST)


def _weighed(
    dy: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, copy_of_row: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    drows = rows.new_empty(rows.shape)
    # Zeros: a copy without an expert has no row, and no program writes its weight's gradient.
    dweights = weights.new_zeros(weights.shape, dtype=torch.float32)
    R, D = rows.shape
    if drows.numel():
        tensors = dy.contiguous(), rows.contiguous(), weights.contiguous(), copy_of_row
        _weigh[(R,)](*tensors, drows, dweights, weights.shape[1], D, BLOCK=_block(D))
    return drows, dweights


def _weighed_fake(
    _: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, *__: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape, dtype=torch.float32)


_weighed_of = operator("unpermute_gradients", _weighed, fake=_weighed_fake)


def _permuted(
    x: torch.Tensor, copy_of_row: torch.Tensor, row_of_copy: torch.Tensor
) -> torch.Tensor:
    R, D = copy_of_row.shape[0], x.shape[1]
    rows = x.new_empty(R, D)
    if rows.numel():
        block = _block(D)
        grid = (R, cdiv(D, block))
        _copy[grid](x.contiguous(), copy_of_row, rows, row_of_copy.shape[1], D, BLOCK=block)
    return rows


def _permuted_fake(x: torch.Tensor, copy_of_row: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x.new_empty(copy_of_row.shape[0], x.shape[1])


def _back_permuted(ctx: Any, drows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _unpermute_of(drows, None, *ctx.saved_tensors), None, None


_permute_of = operator(
    "permute",
    _permuted,
    fake=_permuted_fake,
    keep=keep_inputs(3, first=1),
    backward=_back_permuted,
)


def add_rows(
    rows: torch.Tensor, weights: torch.Tensor | None, row_of_copy: torch.Tensor
) -> torch.Tensor:
    """The sum of each token's rows, each times its weight, [T, D]."""
    (T, K), D = row_of_copy.shape, rows.shape[1]
    y = rows.new_empty(T, D)
    if y.numel():
        block = _block(D)
        rows = rows.contiguous()
        # Without weights the kernel does not read that pointer.
        addends = rows, row_of_copy, rows if weights is None else weights.contiguous()
        _add[(T, cdiv(D, block))](*addends, y, K, D, WEIGHTED=weights is not None, BLOCK=block)
    return y


def _unpermuted(
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    copy_of_row: torch.Tensor,
    row_of_copy: torch.Tensor,
) -> torch.Tensor:
    del copy_of_row
    return add_rows(rows, weights, row_of_copy)


def _unpermuted_fake(rows: torch.Tensor, *further: Any) -> torch.Tensor:
    row_of_copy = further[-1]
    return rows.new_empty(row_of_copy.shape[0], rows.shape[1])


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    rows, weights, copy_of_row, row_of_copy = inputs
    # The gradient of an unweighted sum does not depend on the rows.
    ctx.save_for_backward(None if weights is None else rows, weights, copy_of_row, row_of_copy)


def _back_unpermuted(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows, weights, copy_of_row, row_of_copy = ctx.saved_tensors
    if weights is None:
        return _permute_of(dy, copy_of_row, row_of_copy), None, None, None
    drows, dweights = _weighed_of(dy, rows, weights, copy_of_row)
    return drows, dweights.to(weights.dtype), None, None


_unpermute_of = operator(
    "unpermute", _unpermuted, fake=_unpermuted_fake, keep=_keep_rows, backward=_back_unpermuted
)


def permute(x_TD: torch.Tensor, order: Order) -> torch.Tensor:
    """A row for every copy of a token, sorted by expert, [R, D]."""
    return _permute_of(x_TD, order.copy_of_row, order.row_of_copy)


def unpermute(y_RD: torch.Tensor, weights_TK: torch.Tensor | None, order: Order) -> torch.Tensor:
    """The sum of each token's rows, each times its weight, [T, D]; rounded once, from fp32."""
    return _unpermute_of(y_RD, weights_TK, order.copy_of_row, order.row_of_copy)
