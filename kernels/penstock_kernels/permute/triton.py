"""permute and unpermute on Triton: tokens are copied, weighted and added while they are moved.

T tokens, K copies of each, R rows, D columns. The gradient of copying is adding, and that of adding
is copying. Each result is one program's, which reads what it needs by the order or its inverse:
nothing is added atomically, so results are the same from run to run.
"""

# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false

from typing import Any

import torch
import triton
import triton.language as tl

from penstock_kernels.permute.order import Order

WIDEST = 2048
"""Columns that a program holds at a time."""


@triton.jit
def _copy(x_ptr, copy_of_row_ptr, rows_ptr, K, D, BLOCK: tl.constexpr):
    """A row of a token, zeros for nobody's."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    copy = tl.load(copy_of_row_ptr + row)
    known = tl.where(copy >= 0, D, 0)
    x = tl.load(x_ptr + copy // K * D + at, mask=at < known, other=0)
    tl.store(rows_ptr + row * D + at, x, mask=at < D)


@triton.jit
def _add(
    rows_ptr, row_of_copy_ptr, weights_ptr, y_ptr, K, D, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    """A token of its rows, summed in fp32 in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(0, K):
        row = tl.load(row_of_copy_ptr + token * K + k)
        known = tl.where(row >= 0, D, 0)
        values = tl.load(rows_ptr + row * D + at, mask=at < known, other=0)
        values = values.to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights_ptr + token * K + k).to(tl.float32)
        total += values
    tl.store(y_ptr + token * D + at, total, mask=at < D)


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
    """Of one row: its gradient, `weight * dy`, and its weight's, `dy . row`."""
    row = tl.program_id(0).to(tl.int64)
    copy = tl.load(copy_of_row_ptr + row)
    known = tl.where(copy >= 0, D, 0)
    weight = tl.load(weights_ptr + copy, mask=copy >= 0, other=0).to(tl.float32)
    product = tl.zeros([BLOCK], dtype=tl.float32)
    for column in range(0, D, BLOCK):
        at = column + tl.arange(0, BLOCK)
        dy = tl.load(dy_ptr + copy // K * D + at, mask=at < known, other=0).to(tl.float32)
        values = tl.load(rows_ptr + row * D + at, mask=at < known, other=0).to(tl.float32)
        product += dy * values
        tl.store(drows_ptr + row * D + at, dy * weight, mask=at < D)
    tl.store(dweights_ptr + copy, tl.sum(product, axis=0), mask=copy >= 0)


def _block(D: int) -> int:
    return min(triton.next_power_of_2(D), WIDEST)


def _copied(x_TD: torch.Tensor, order: Order) -> torch.Tensor:
    R, D, K = order.copy_of_row.shape[0], x_TD.shape[1], order.row_of_copy.shape[1]
    rows_RD = torch.empty(R, D, dtype=x_TD.dtype, device=x_TD.device)
    if rows_RD.numel():
        block = _block(D)
        grid = (R, triton.cdiv(D, block))
        _copy[grid](x_TD.contiguous(), order.copy_of_row, rows_RD, K, D, BLOCK=block)
    return rows_RD


def _added(rows_RD: torch.Tensor, weights_TK: torch.Tensor | None, order: Order) -> torch.Tensor:
    (T, K), D = order.row_of_copy.shape, rows_RD.shape[1]
    y_TD = torch.empty(T, D, dtype=rows_RD.dtype, device=rows_RD.device)
    if y_TD.numel():
        block = _block(D)
        rows_RD = rows_RD.contiguous()
        _add[(T, triton.cdiv(D, block))](
            rows_RD,
            order.row_of_copy,
            rows_RD if weights_TK is None else weights_TK.contiguous(),
            y_TD,
            K,
            D,
            WEIGHTED=weights_TK is not None,
            BLOCK=block,
        )
    return y_TD


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, order: Order) -> torch.Tensor:
        ctx.order = order
        return _copied(x_TD, order)

    @staticmethod
    def backward(ctx: Any, drows_RD: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _added(drows_RD, None, ctx.order), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: torch.Tensor, order: Order) -> torch.Tensor:
        ctx.order = order
        return _added(rows_RD, None, order)

    @staticmethod
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _copied(dy_TD, ctx.order), None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RD: torch.Tensor, weights_TK: torch.Tensor, order: Order
    ) -> torch.Tensor:
        ctx.order = order
        ctx.save_for_backward(rows_RD, weights_TK)
        return _added(rows_RD, weights_TK, order)

    @staticmethod
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows_RD, weights_TK = ctx.saved_tensors
        copy_of_row = ctx.order.copy_of_row
        drows_RD = torch.empty_like(rows_RD, memory_format=torch.contiguous_format)
        dweights_TK = torch.zeros(weights_TK.shape, dtype=torch.float32, device=dy_TD.device)
        R, D = rows_RD.shape
        if drows_RD.numel():
            _weigh[(R,)](
                dy_TD.contiguous(),
                rows_RD.contiguous(),
                weights_TK.contiguous(),
                copy_of_row,
                drows_RD,
                dweights_TK,
                weights_TK.shape[1],
                D,
                BLOCK=_block(D),
            )
        return drows_RD, dweights_TK.to(weights_TK.dtype), None


def permute(x_TD: torch.Tensor, order: Order) -> torch.Tensor:
    """A row for every copy of a token, sorted by expert, [R, D]."""
    return _Permute.apply(x_TD, order)


def unpermute(y_RD: torch.Tensor, weights_TK: torch.Tensor | None, order: Order) -> torch.Tensor:
    """The sum of each token's rows, each times its weight, [T, D]; rounded once, from fp32."""
    if weights_TK is None:
        return _Sum.apply(y_RD, order)
    return _WeightedSum.apply(y_RD, weights_TK, order)
