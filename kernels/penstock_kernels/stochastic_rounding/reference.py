"""Definition of stochastic rounding; slow.

N rows, K columns, a stack of such matrices with leading dimensions; R rows of all.
"""

from collections.abc import Sequence

import torch

from penstock_kernels.rng_rows import RowKeys, blocks, require_rows, side_by_side, words

# The last word of counters: one key draws other words than in `dropout` (0) and `noise` (1).
PURPOSE = 2

LOW = 0xFFFF
"""The bits of a float32 that bfloat16 drops."""


def stochastic_round(
    x_NK: torch.Tensor, runs: Sequence[RowKeys], first_column: int = 0
) -> torch.Tensor:
    """`x` [..., N, K], float32, rounded to bfloat16: to one of the two neighbors, the nearer more
    often.

    The expected result is the number: the probability of rounding away from zero is the distance
    from the neighbor closer to zero, in 65536ths of the distance between the neighbors. Values that
    bfloat16 represents do not change, including infinities and NaN. Beyond the largest number the
    other neighbor is infinite.

    `runs` name the tensors of all R rows, in order, and `first_column` is the index of the first
    column in the full tensor. An element's random number is a function of its run's key and of its
    row and column there.

    Raises:
        ValueError: `x` is not in float32, or runs are not its rows.
    """
    require_float32(x_NK)
    require_rows(x_NK.shape, runs, first_column)
    y_NK = torch.empty(x_NK.shape, dtype=torch.bfloat16, device=x_NK.device)
    columns = x_NK.shape[-1]
    # Not -1, which an empty tensor could not infer.
    x_RK, y_RK = (tensor.flatten(0, -2) for tensor in (x_NK, y_NK))
    for rows_slice, run in blocks(runs, columns):
        drawn = random_words(run, first_column, columns, x_NK.device)
        y_RK[rows_slice] = rounded(x_RK[rows_slice], drawn & LOW)
    return y_NK


def require_float32(x: torch.Tensor) -> None:
    """Refuse other dtypes, because the low 16 bits of float32 are rounded."""
    if x.dtype != torch.float32:
        raise ValueError(f"x is in {x.dtype}, and numbers are rounded from float32")
    if x.ndim < 2:
        raise ValueError(f"x is {tuple(x.shape)}; it must have rows and columns")


def random_words(
    run: RowKeys, first_column: int, columns: int, device: torch.device
) -> torch.Tensor:
    """A word of 32 bits for each element of a run's rows, int64 [rows, columns]."""
    return side_by_side(words(run, first_column, columns, PURPOSE, device), first_column, columns)


def rounded(x: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """float32 to bfloat16, rounded up where the low half of its bits plus `drawn`, 0 to 65535,
    exceeds 65535.
    """
    # Bits without the sign are ordered as magnitudes: a carry out of the low half gives the next
    # bfloat16 away from zero, in the next binade too.
    bits = (x.contiguous().view(torch.int32) + drawn.to(torch.int32)) & ~LOW
    return torch.where(x.isnan(), x, bits.view(torch.float32)).to(torch.bfloat16)
