"""What rounding at random means. The slow reference of every other implementation.

N rows, K columns, a stack of such matrices with leading dimensions; R rows of all.
"""

from collections.abc import Sequence

import torch

from penstock_kernels.rng_rows import RowKeys, blocks, require_rows, side_by_side, words

PURPOSE = 2
"""The last word of counters: one key draws other words than in `dropout` (0) and `noise` (1)."""

LOW = 0xFFFF
"""The bits of a float32 that a bfloat16 lacks."""


def stochastic_round(
    x_NK: torch.Tensor, runs: Sequence[RowKeys], first_column: int = 0
) -> torch.Tensor:
    """x [..., N, K], float32, in bfloat16: one of the two neighbours, the nearer more often.

    The mean of what a number is rounded to is the number: of the distance between its neighbours it
    is some share above the one that is closer to zero, in 65536ths, and that is the chance of the
    other one. What bfloat16 holds stays, infinities and what is no number too. Beyond the largest
    number the other neighbour is infinite.

    runs say of all R rows, one after another, whose they are, and first_column is the first
    one's number in the whole tensor. What is drawn for an element is a function of its run's key
    and of its row and column there.

    Raises:
        ValueError: x is not in float32, or runs are not its rows.
    """
    require_float32(x_NK)
    require_rows(x_NK.shape, runs, first_column)
    y_NK = torch.empty(x_NK.shape, dtype=torch.bfloat16, device=x_NK.device)
    columns = x_NK.shape[-1]
    # Not by -1, which no rows have.
    x_RK, y_RK = (one.flatten(0, -2) for one in (x_NK, y_NK))
    for here, run in blocks(runs, columns):
        drawn = drawn_words(run, first_column, columns, x_NK.device)
        y_RK[here] = rounded(x_RK[here], drawn & LOW)
    return y_NK


def require_float32(x: torch.Tensor) -> None:
    """Refuse numbers of another kind, of which other bits would be cut off."""
    if x.dtype != torch.float32:
        raise ValueError(f"x is in {x.dtype}, and numbers are rounded from float32")
    if x.ndim < 2:
        raise ValueError(f"x is {tuple(x.shape)}; it must have rows and columns")


def drawn_words(
    run: RowKeys, first_column: int, columns: int, device: torch.device
) -> torch.Tensor:
    """A word of 32 bits for each element of a run's rows, int64 [rows, columns]."""
    return side_by_side(words(run, first_column, columns, PURPOSE, device), first_column, columns)


def rounded(x: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """float32 as bfloat16, up where the low half of its bits and drawn, 0 to 65535, make more
    than 65535 together."""
    bits = (x.contiguous().view(torch.int32) + drawn.to(torch.int32)) & ~LOW
    return torch.where(x.isnan(), x, bits.view(torch.float32)).to(torch.bfloat16)
