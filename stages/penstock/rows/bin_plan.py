"""Packing plans, and the packing algorithms that read samples in order. No files, no tensors.

A plan is `(samples, ends)`: the sample indices row by row, and the end of each row in them; row i
is `samples[ends[i - 1]:ends[i]]`. Both are int64. Algorithms that fill rows better are in
`penstock.rows.packing`.
"""

from dataclasses import dataclass
from heapq import heappush, heapreplace
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Sizes = npt.NDArray[np.integer[Any]]
"""Integers of any width."""


@dataclass(frozen=True)
class PackingPlan:
    """Assignment of samples to rows: `samples` has one entry per sample, `ends` one per row."""

    samples: Indices
    ends: Indices

    def __len__(self) -> int:
        return len(self.ends)

    def row(self, index: int) -> Indices:
        """Sample indices of one row."""
        start = int(self.ends[index - 1]) if index else 0
        return self.samples[start : int(self.ends[index])]

    def sizes(self) -> Indices:
        """Number of samples of each row."""
        return np.diff(self.ends, prepend=0)

    def tolist(self) -> list[list[int]]:
        """One list of sample indices per row."""
        return [self.row(index).tolist() for index in range(len(self))]


def join(parts: list[PackingPlan]) -> PackingPlan:
    """Concatenate the rows of all parts; sample indices are unchanged."""
    if len(parts) == 1:
        return parts[0]
    samples = [part.samples for part in parts]
    starts = np.cumsum([0, *(len(sample) for sample in samples)])
    ends = [part.ends + start for part, start in zip(parts, starts.tolist(), strict=False)]
    empty = np.empty(0, dtype=np.int64)
    return PackingPlan(np.concatenate([empty, *samples]), np.concatenate([empty, *ends]))


def one_per_row(num_samples: int) -> PackingPlan:
    """One sample per row."""
    return PackingPlan(np.arange(num_samples, dtype=np.int64), np.arange(1, num_samples + 1))


def sequential(lengths: npt.ArrayLike, capacity: int) -> PackingPlan:
    """Next fit: fill rows in the order given; a sample that does not fit opens the next row.

    A sample longer than `capacity` gets its own row.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    return PackingPlan(np.arange(len(sizes), dtype=np.int64), next_fit(sizes, capacity))


def next_fit(sizes: Sizes, capacity: int) -> Indices:
    """The end of each row if rows are filled in the order given."""
    # One vectorized search for the row end of every possible first sample is cheaper than one
    # search per row.
    totals = np.cumsum(sizes, dtype=np.int64)
    reach = totals - sizes
    reach += capacity
    following = np.searchsorted(totals, reach, side="right")
    if len(sizes) and sizes.max() > capacity:
        # A sample that is longer than a row has `following` at itself: the loop would not advance.
        np.maximum(following, np.arange(1, len(sizes) + 1), out=following)
    # A memoryview is indexed with Python integers, much faster than an array with its scalars.
    jump, last = following.data, len(sizes)
    ends: list[int] = []
    start = 0
    while start < last:
        start = jump[start]
        ends.append(start)
    return np.array(ends, dtype=np.int64)


def greedy(lengths: npt.ArrayLike, capacity: int, group_size: int) -> PackingPlan:
    """Worst fit of samples in the order given, `group_size` consecutive samples at a time.

    Each sample goes to the row of its group with the most room (of several, the oldest); if it does
    not fit there, it opens a row. No sample may be longer than `capacity`. Rows are in the order in
    which they were opened. Equal to ERNIEKit's `greedy_intokens`, which uses groups of 500.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    starts = range(0, len(sizes), group_size)
    return join(
        [_worst_fit(sizes[start : start + group_size], capacity, start) for start in starts]
    )


def _worst_fit(sizes: Indices, capacity: int, first: int) -> PackingPlan:
    rows: list[list[int]] = []
    heap: list[tuple[int, int]] = []  # (-room, row): the row with the most room comes first
    for sample, size in enumerate(sizes.tolist(), start=first):
        if heap and -heap[0][0] >= size:
            room, row = heap[0]
            rows[row].append(sample)
            heapreplace(heap, (room + size, row))
        else:
            heappush(heap, (size - capacity, len(rows)))
            rows.append([sample])
    samples = np.array([sample for row in rows for sample in row], dtype=np.int64)
    return PackingPlan(samples, np.cumsum([len(row) for row in rows], dtype=np.int64))


@dataclass(frozen=True)
class Pieces:
    """Rows of pieces (token spans) of samples; entry i of each array is of piece i, row by row."""

    bins: PackingPlan
    """`samples` is the sample of each piece; a sample may have several, in consecutive rows."""
    begins: Indices
    """Index of the piece's first token in the sample."""
    sizes: Indices
    """Number of tokens of each piece."""


def wrapped(lengths: npt.ArrayLike, capacity: int) -> Pieces:
    """Concatenate the samples in the order given and split them every `capacity` tokens.

    All rows except the last are full. Lengths are at least 1. Same as Megatron-LM's GPT dataset
    and TRL's `packing_strategy="wrapped"`.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(ends, np.arange(capacity, total, capacity, dtype=np.int64))
    starts = np.concatenate([np.zeros(min(1, len(cuts)), dtype=np.int64), cuts[:-1]])
    samples = np.searchsorted(ends, starts, side="right").astype(np.int64)
    rows = starts // capacity
    last_of_row = np.flatnonzero(np.diff(rows, append=-1)) + 1
    begins = starts - (ends - sizes)[samples]
    return Pieces(PackingPlan(samples, last_of_row.astype(np.int64)), begins, cuts - starts)
