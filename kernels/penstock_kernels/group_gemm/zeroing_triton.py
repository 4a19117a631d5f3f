"""Zeroing on Triton: programs without a row to zero read a few numbers and exit."""

# pyright: reportArgumentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl

from penstock_kernels.launch_sizes import cdiv, next_power_of_2

ELEMENTS = 4096
"""Elements written by a program at a time."""
EACH = 65536
"""Elements of one row that a program processes."""
ROWS = 32
"""Rows that a program processes, if they are narrower than `ELEMENTS`."""


@triton.jit(do_not_specialize=["R"])
def _zero_rows(
    y_ptr,
    numbers_ptr,
    R,
    W,
    last,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EACH: tl.constexpr,
):
    """TAIL: rows from number `last` on; else rows whose own number is 0."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if TAIL:
        chosen = (rows >= tl.load(numbers_ptr + last)) & (rows < R)
    else:
        chosen = tl.load(numbers_ptr + rows, mask=rows < R, other=1) == 0
    if tl.max(chosen.to(tl.int32), axis=0) > 0:
        first = tl.program_id(1) * EACH
        for column in range(first, tl.minimum(first + EACH, W), COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            ptrs = y_ptr + rows[:, None] * W + columns[None, :]
            tl.store(ptrs, 0.0, mask=chosen[:, None] & (columns < W)[None, :])


def zero_tail(y_TN: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """Same as the reference."""
    return _zero(y_TN, ends_G, y_TN.shape[1], tail=True)


def zero_empty(y_GMN: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    """Same as the reference."""
    return _zero(y_GMN, counts_G, y_GMN.shape[1] * y_GMN.shape[2], tail=False)


def _zero(y: torch.Tensor, numbers_G: torch.Tensor, W: int, *, tail: bool) -> torch.Tensor:
    R = y.shape[0]
    if y.numel():
        rows = ROWS if W <= ELEMENTS else 1
        columns = min(next_power_of_2(W), ELEMENTS // rows)
        grid = (cdiv(R, rows), cdiv(W, EACH))
        last = numbers_G.shape[0] - 1
        shape = {"ROWS": rows, "COLUMNS": columns, "EACH": EACH}
        _zero_rows[grid](y, numbers_G, R, W, last, TAIL=tail, **shape)
    return y
