"""stochastic_round on Triton: random numbers in registers. R rows of all matrices."""

# pyright: reportArgumentType=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.rng_rows import RowKeys, copy_tables, require_rows
from penstock_kernels.stochastic_rounding.draws import (
    LOW,
    as_bfloat16,
    random_words,
    round_stochastically,
    tile,
)
from penstock_kernels.stochastic_rounding.reference import require_float32


@triton.jit(do_not_specialize=["R", "num_runs", "first"])
def _round(
    x_ptr,
    y_ptr,
    runs_ptr,
    R,
    K,
    num_runs,
    first,
    ROWS: tl.constexpr,
    ACROSS: tl.constexpr,
    RUNS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    drawn = random_words(row, runs_ptr, num_runs, first, ROWS, ACROSS, RUNS)
    # Random words come in groups of four columns of the full tensor: a shard that begins within a
    # group begins SHIFT columns into its first tile.
    column = tl.program_id(1) * ACROSS - SHIFT + tl.arange(0, ACROSS)
    inside = (row < R)[:, None] & ((column >= 0) & (column < K))[None, :]
    offs = row[:, None] * K + column[None, :]
    x = tl.load(x_ptr + offs, mask=inside, other=0)
    tl.store(y_ptr + offs, as_bfloat16(round_stochastically(x, drawn & LOW)), mask=inside)


def stochastic_round(
    x_NK: torch.Tensor, runs: Sequence[RowKeys], first_column: int = 0
) -> torch.Tensor:
    """Bitwise identical to the reference."""
    require_float32(x_NK)
    require_rows(x_NK.shape, runs, first_column)
    x_NK = x_NK.contiguous()
    y_NK = torch.empty_like(x_NK, dtype=torch.bfloat16)
    if x_NK.numel():
        K = x_NK.shape[-1]
        R = x_NK.numel() // K
        rows, across = tile(K)
        [table] = copy_tables([runs], x_NK.device)
        _round[(cdiv(R, rows), cdiv(first_column % 4 + K, across))](
            *(x_NK, y_NK, table, R, K, len(runs), first_column),
            ROWS=rows,
            ACROSS=across,
            RUNS=next_power_of_2(len(runs)),
            SHIFT=first_column % 4,
        )
    return y_NK
