"""adamw_ on Triton: one pass over each tensor. R rows of all matrices, K columns."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from penstock_kernels.adamw.reference import Settings, require_step
from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.rng_rows import RowKeys, copy_tables
from penstock_kernels.stochastic_rounding.draws import (
    LOW,
    as_bfloat16,
    random_words,
    round_stochastically,
    round_to_nearest,
    tile,
)


@triton.jit
def _store(ptrs, x, inside):
    if ptrs.dtype.element_ty == tl.bfloat16:
        # No rounding: bfloat16 holds every number that is put as that.
        x = as_bfloat16(x)
    tl.store(ptrs, x, mask=inside)


# Triton compiles another program for integers that are 1 or divisible by 16: these vary.
@triton.jit(
    do_not_specialize=[
        *("R", "num_runs", "first_column", "forgets1", "beta2", "forgets2"),
        *("eps", "decay", "size", "root"),
    ]
)
def _step(
    weight_ptr,
    gradient_ptr,
    first_ptr,
    second_ptr,
    lost_ptr,
    runs_ptr,
    R,
    K,
    num_runs,
    first_column,
    forgets1,
    beta2,
    forgets2,
    eps,
    decay,
    size,
    root,
    ROWS: tl.constexpr,
    ACROSS: tl.constexpr,
    RUNS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """`lost_ptr` may be None, and RUNS 0: then nothing is rounded stochastically."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * ACROSS - SHIFT + tl.arange(0, ACROSS)
    inside = (row < R)[:, None] & ((column >= 0) & (column < K))[None, :]
    offs = row[:, None] * K + column[None, :]
    g = tl.load(gradient_ptr + offs, mask=inside, other=0).to(tl.float32)
    m = tl.load(first_ptr + offs, mask=inside, other=0).to(tl.float32)
    v = tl.load(second_ptr + offs, mask=inside, other=0).to(tl.float32)
    w = tl.load(weight_ptr + offs, mask=inside, other=0).to(tl.float32)
    m = m + (g - m) * forgets1
    v = v * beta2 + g * g * forgets2
    # To the nearest, as PyTorch does: Triton's own division and root of fp32 are approximate.
    update = tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    if lost_ptr is not None:
        w += tl.load(lost_ptr + offs, mask=inside, other=0).to(tl.float32)
    w = w * decay - update * size
    if RUNS:
        drawn = random_words(row, runs_ptr, num_runs, first_column, ROWS, ACROSS, RUNS)
    if first_ptr.dtype.element_ty == tl.bfloat16:
        m = round_to_nearest(m)
    _store(first_ptr + offs, m, inside)
    if second_ptr.dtype.element_ty == tl.bfloat16:
        v = round_stochastically(v, drawn >> 16) if RUNS else round_to_nearest(v)
    _store(second_ptr + offs, v, inside)
    stored = w
    if weight_ptr.dtype.element_ty == tl.bfloat16:
        stored = (
            round_stochastically(w, drawn & LOW)
            if RUNS and lost_ptr is None
            else round_to_nearest(w)
        )
    _store(weight_ptr + offs, stored, inside)
    if lost_ptr is not None:
        # Exact: what bfloat16 leaves of a float32 has fewer bits than that.
        remainder = w - stored
        if lost_ptr.dtype.element_ty == tl.bfloat16:
            remainder = round_to_nearest(remainder)
        _store(lost_ptr + offs, remainder, inside)


def adamw_(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    settings: Settings,
    runs: Sequence[RowKeys] | None = None,
    first_column: int = 0,
    lost: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> None:
    """Same as the reference, except for fused multiply-adds, and for stochastic rounding of values
    that differ because of them.
    """
    require_step(weight, (gradient, first, second, lost), settings, runs, first_column)
    if not weight.numel():
        return
    K = weight.shape[-1]
    R = weight.numel() // K
    rows, across = tile(K)
    # Random words are for groups of four columns, aligned to the full tensor's columns.
    begins = 0 if runs is None else first_column
    if runs is not None and table is None:
        [table] = copy_tables([runs], weight.device)
    tensors = weight, gradient, first, second, lost, table
    rates = (
        *(1 - settings.beta1, settings.beta2, 1 - settings.beta2, settings.eps),
        *(settings.decay_factor, settings.step_size, settings.bias_correction2_sqrt),
    )
    _step[(cdiv(R, rows), cdiv(begins % 4 + K, across))](
        *tensors,
        *(R, K, 0 if runs is None else len(runs), begins),
        *rates,
        ROWS=rows,
        ACROSS=across,
        RUNS=0 if runs is None else next_power_of_2(len(runs)),
        SHIFT=begins % 4,
    )
