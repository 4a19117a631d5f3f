"""Counter-based random numbers (Philox4x32-10), also of matrices whose rows belong to several
tensors, each with its key. The reference; on Triton `tl.philox` is the same.

Fused projections and stacks of experts are such matrices. An element's random number is a function
of its tensor's key and of its row and column there, so it does not depend on sharding or fusion.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from penstock_kernels.to_device import to_device

# Random numbers generated at a time: their words, 64 bits each here, fit the caches.
AT_ONCE = 1 << 18

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
"""The largest number of 32 bits; tensors hold such numbers as int64."""


@dataclass(frozen=True)
class RowKeys:
    """A range of rows of one tensor, with its key."""

    rows: int
    key: int
    """64 bits: the key of the tensor's random numbers."""
    first_row: int = 0
    """Index of the first row in the full tensor."""


def philox(counter: Sequence[torch.Tensor], key: int) -> tuple[torch.Tensor, ...]:
    """Four random words of 32 bits for each counter of four words; broadcasts.

    With a key of 64 bits (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3",
    section 5.1.2).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & WORD, key >> 32
    for _ in range(ROUNDS):
        high_0, low_0 = _product(c0, MULTIPLIERS[0])
        high_2, low_2 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + INCREMENTS[0]) & WORD, (k1 + INCREMENTS[1]) & WORD
    return c0, c1, c2, c3


def _product(uint32: torch.Tensor, by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of a product of two words, the second at least 2^31."""
    # With 2^32 minus the second word the product fits a signed 64-bit integer.
    # Arithmetic shifts round down, and so does the high word of a product.
    less = uint32 * (by - 2**32)
    return (less >> 32) + uint32, less & WORD


def require_rows(shape: Sequence[int], runs: Sequence[RowKeys], first_column: int) -> None:
    """Refuse runs that are not the rows of all matrices of this shape [..., N, K].

    Raises:
        ValueError: there are fewer or more rows, a key has more than 64 bits, or a count is
            negative.
    """
    rows, have = math.prod(shape[:-1]), sum(run.rows for run in runs)
    if rows != have:
        raise ValueError(f"runs have {have} rows, and {tuple(shape)} has {rows}")
    if any(not 0 <= run.key < 2**64 or run.first_row < 0 or run.rows < 0 for run in runs):
        raise ValueError("a run's key has 64 bits, and its rows are not negative")
    if first_column < 0:
        raise ValueError(f"columns begin at {first_column}")


def blocks(runs: Sequence[RowKeys], columns: int) -> Iterator[tuple[slice, RowKeys]]:
    """The rows of all runs, a block at a time, with their runs."""
    block_rows = max(AT_ONCE // max(columns, 1), 1)
    start = 0
    for run in runs:
        for row in range(0, run.rows, block_rows):
            rows = min(block_rows, run.rows - row)
            yield (
                slice(start + row, start + row + rows),
                RowKeys(rows, run.key, run.first_row + row),
            )
        start += run.rows


def words(
    run: RowKeys, first_column: int, columns: int, purpose: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Random words for groups of four columns, from the group of `first_column` on: four words of
    32 bits, each int64 [rows, groups].

    Philox4x32-10 of the counter (group, low half of the row, high half of it, `purpose`) and the
    run's key; rows and columns are indices in the full tensor.
    """
    numbers_R = torch.arange(run.rows, device=device) + run.first_row
    return words_of_rows(numbers_R, run.key, first_column, columns, purpose)


def words_of_rows(
    numbers_R: torch.Tensor, key: int, first_column: int, columns: int, purpose: int
) -> tuple[torch.Tensor, ...]:
    """The same for rows of these numbers, int64."""
    end_group = -(-(first_column + columns) // 4)
    groups_G = torch.arange(first_column // 4, end_group, device=numbers_R.device)
    low_R1, high_R1 = numbers_R[:, None] & WORD, (numbers_R[:, None] >> 32) & WORD
    return philox((groups_G, low_R1, high_R1, torch.full_like(low_R1, purpose)), key)


def side_by_side(four: Sequence[torch.Tensor], first_column: int, columns: int) -> torch.Tensor:
    """Values of each group's four words, by column, [rows, columns]."""
    return torch.stack(tuple(four), -1).flatten(1).narrow(1, first_column % 4, columns)


def copy_tables(
    runs_of_tensors: Sequence[Sequence[RowKeys]], device: torch.device
) -> list[torch.Tensor]:
    """Tables of the runs for kernels, each int64 [3, runs]: the end of a run's rows, its key, and
    the offset of its rows in their tensor. One copy to the device for all.
    """
    numbers: list[int] = []
    for runs in runs_of_tensors:
        ends = list(accumulate(run.rows for run in runs))
        numbers += ends
        # Two's complement: PyTorch has no arithmetic for uint64, and the bits are what counts.
        numbers += [run.key - 2**64 if run.key >= 2**63 else run.key for run in runs]
        # A run's rows begin at its end less its length; added to a row, this gives the tensor's.
        numbers += [run.first_row + run.rows - end for run, end in zip(runs, ends, strict=True)]
    copied = to_device(torch.tensor(numbers), device)
    tables = copied.split([3 * len(runs) for runs in runs_of_tensors])
    return [part.view(3, -1) for part in tables]
