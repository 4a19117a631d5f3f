"""zero_rows on Triton: programs without a row to zero read a few flags and exit."""

# pyright: reportArgumentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl

ELEMENTS = 4096
"""Elements written by a program at a time."""
EACH = 65536
"""Elements of one row that a program processes."""
ROWS = 32
"""Rows that a program processes, if they are narrower than `ELEMENTS`."""


@triton.jit(do_not_specialize=["R"])
def _zero_rows(
    y_ptr, flags_ptr, R, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EACH: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    flags = tl.load(flags_ptr + rows, mask=rows < R, other=0) != 0
    if tl.max(flags.to(tl.int32), axis=0) > 0:
        first = tl.program_id(1) * EACH
        for column in range(first, tl.minimum(first + EACH, W), COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            at = y_ptr + rows[:, None] * W + columns[None, :]
            tl.store(at, 0.0, mask=flags[:, None] & (columns < W)[None, :])


def zero_rows(y_RW: torch.Tensor, is_unwritten_R: torch.Tensor) -> torch.Tensor:
    """Zero, in place, the rows of y_RW that is_unwritten_R names; return y_RW."""
    R, W = y_RW.shape
    if y_RW.numel():
        rows = ROWS if W <= ELEMENTS else 1
        columns = min(triton.next_power_of_2(W), ELEMENTS // rows)
        grid = (triton.cdiv(R, rows), triton.cdiv(W, EACH))
        flags = is_unwritten_R.to(torch.int8)
        _zero_rows[grid](y_RW, flags, R, W, ROWS=rows, COLUMNS=columns, EACH=EACH)
    return y_RW
