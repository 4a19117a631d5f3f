"""add_noise_ on Triton: random numbers in registers, added in place. R rows of all matrices."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.noise import reference
from penstock_kernels.op import INTERPRETED
from penstock_kernels.quant import QuantizedTensor, step_size
from penstock_kernels.quant.triton_dequantize import tile
from penstock_kernels.quant.triton_numbers import to_bf16_grid
from penstock_kernels.rng_rows import RowKeys, copy_tables

PURPOSE = tl.constexpr(reference.PURPOSE)
TURN = tl.constexpr(2 * math.pi)
STEP = tl.constexpr(2**-32)


@triton.jit
def _uniform(uint32):
    return uint32.to(tl.float32) * STEP + STEP / 2


@triton.jit
def _two_normals(first, second):
    size = tl.sqrt(-2.0 * tl.log(_uniform(first)))
    angle = TURN * _uniform(second)
    return size * tl.cos(angle), size * tl.sin(angle)


@triton.jit(do_not_specialize=["R", "num_runs"])
def _add(
    w_ptr,
    spread_ptr,
    runs_ptr,
    R,
    K,
    stride,
    num_groups,
    num_runs,
    first,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUNS: tl.constexpr,
    ROUND: tl.constexpr,
):
    """ROWS x COLUMNS of w. `runs_ptr`: for each run the end of its rows, its key, and the offset of
    its rows in their tensor; `spread_ptr`: for each group, or each row.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < R)[:, None]
    row = row.to(tl.int64)
    runs = tl.arange(0, RUNS)
    # Lanes past the last run end at R, which no row inside reaches.
    ends = tl.load(runs_ptr + runs, mask=runs < num_runs, other=R)
    run = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)
    run = tl.minimum(run, num_runs - 1)
    key = tl.load(runs_ptr + num_runs + run)[:, None]
    number = (row + tl.load(runs_ptr + 2 * num_runs + run))[:, None]

    group = (first // 4 + tl.program_id(1) * (COLUMNS // 4)) + tl.arange(0, COLUMNS // 4)
    zero = tl.zeros([ROWS, COLUMNS // 4], dtype=tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        key,
        zero + group.to(tl.uint32)[None, :],
        zero + number.to(tl.uint32),
        zero + (number >> 32).to(tl.uint32),
        zero + PURPOSE,
    )
    n0, n1 = _two_normals(w0, w1)
    n2, n3 = _two_normals(w2, w3)
    # Columns of a group are contiguous.
    noise = tl.interleave(tl.interleave(n0, n2), tl.interleave(n1, n3))

    column = tl.program_id(1) * COLUMNS
    if GROUP == 0:
        column -= first % 4
        spread = tl.load(spread_ptr + row[:, None], mask=inside, other=0)
        spread = spread + tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    else:
        of_row = column // GROUP + tl.arange(0, COLUMNS // GROUP)
        has_group = inside & (of_row < num_groups)[None, :]
        spread_at = spread_ptr + row[:, None] * num_groups + of_row[None, :]
        spread = tl.load(spread_at, mask=has_group, other=0)[:, :, None]
        spread = spread + tl.zeros([ROWS, COLUMNS // GROUP, GROUP], dtype=tl.float32)
        spread = spread.reshape(ROWS, COLUMNS)
    offs = column + tl.arange(0, COLUMNS)
    inside = inside & ((offs >= 0) & (offs < K))[None, :]
    w_at = w_ptr + row[:, None] * stride + offs[None, :]
    w = tl.load(w_at, mask=inside, other=0).to(tl.float32)
    # Explicit, so that recomputation gives the same numbers whatever a compiler would choose.
    w = tl.fma(noise, spread, w)
    if ROUND:
        w = to_bf16_grid(w)
    tl.store(w_at, w.to(w_ptr.dtype.element_ty), mask=inside)


def add_noise_(
    weight_NK: torch.Tensor,
    quantized: QuantizedTensor,
    alpha: float,
    runs: Sequence[RowKeys],
    first_column: int = 0,
) -> torch.Tensor:
    """Same as the reference, except for the last bits of logarithms and cosines."""
    reference.require_runs(weight_NK, quantized, alpha, runs, first_column)
    if alpha == 0 or not weight_NK.numel():
        return weight_NK
    K, group = quantized.columns, quantized.format.group
    weight_RK = weight_NK.view(-1, K)
    spread = (step_size(quantized) * alpha).contiguous()
    R, num_runs = weight_RK.shape[0], len(runs)
    rows, columns = tile(K, group)
    drawn = first_column % 4 + K
    [table] = copy_tables([runs], weight_RK.device)
    _add[(cdiv(R, rows), cdiv(drawn, columns))](
        *(weight_RK, spread, table, R, K, weight_RK.stride(0)),
        *(spread.shape[-1], num_runs, first_column),
        GROUP=group or 0,
        ROWS=rows,
        COLUMNS=columns,
        RUNS=next_power_of_2(num_runs),
        ROUND=INTERPRETED and weight_RK.dtype == torch.bfloat16,
    )
    return weight_NK
