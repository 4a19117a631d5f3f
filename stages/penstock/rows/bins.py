"""Which samples share a row. Pure functions of lengths: no files, no tensors.

A plan is `(samples, ends)`: the sample indices row after row, and where each row ends in them; row
i holds `samples[ends[i - 1]:ends[i]]`. Both are int64.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Bins:
    """Rows of samples: `samples` has one entry per sample, `ends` one per row."""

    samples: Indices
    ends: Indices

    def __len__(self) -> int:
        return len(self.ends)

    def row(self, index: int) -> Indices:
        """The samples in one row."""
        start = int(self.ends[index - 1]) if index else 0
        return self.samples[start : int(self.ends[index])]

    def tolist(self) -> list[list[int]]:
        """One list of sample indices per row."""
        return [self.row(index).tolist() for index in range(len(self))]

    def reordered(self, order: Indices) -> "Bins":
        """The same rows, the one at `order[i]` standing at place i."""
        sizes = np.diff(self.ends, prepend=0)
        starts = self.ends - sizes
        ends = np.cumsum(sizes[order], dtype=np.int64)
        return Bins(self.samples[_ranges(starts[order], sizes[order])], ends)


def sequential(lengths: npt.ArrayLike, capacity: int) -> Bins:
    """Next fit: fill rows in the order given; a sample that does not fit opens the next row.

    A sample longer than `capacity` has a row of its own.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    totals = np.cumsum(sizes)
    ends: list[int] = []
    start = before = 0
    while start < len(sizes):
        end = max(start + 1, int(np.searchsorted(totals, before + capacity, side="right")))
        ends.append(end)
        start, before = end, int(totals[end - 1])
    return Bins(np.arange(len(sizes), dtype=np.int64), np.array(ends, dtype=np.int64))


def alone(num_samples: int) -> Bins:
    """One sample a row."""
    return Bins(np.arange(num_samples, dtype=np.int64), np.arange(1, num_samples + 1))


def multipack(lengths: npt.ArrayLike, capacity: int, group_size: int) -> Bins:
    """Best fit decreasing, in groups of `group_size` consecutive samples that share no row.

    The longest sample first, each into the fullest row with room for it. Rows come out longest
    first and samples within a row in the order given. Lengths above `capacity` raise ValueError.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and (sizes.max() > capacity or sizes.min() < 1):
        raise ValueError(f"lengths from {sizes.min()} to {sizes.max()} for rows of {capacity}")
    parts: list[Bins] = []
    for start in range(0, len(sizes), group_size):
        group = _best_fit_decreasing(sizes[start : start + group_size], capacity)
        parts.append(Bins(group.samples + start, group.ends + start))
    if not parts:
        return alone(0)
    return Bins(
        np.concatenate([part.samples for part in parts]),
        np.concatenate([part.ends for part in parts]),
    )


@dataclass
class _Rows:
    """`count` rows filled alike: `what` is their lengths as (length, how many), longest first."""

    what: tuple[tuple[int, int], ...]
    count: int


def _best_fit_decreasing(sizes: Indices, capacity: int) -> Bins:
    """Equal lengths, and rows filled alike, are moved together: the work grows with the number of
    distinct lengths, not of samples."""
    lengths, counts = np.unique(sizes, return_counts=True)
    room: dict[int, list[_Rows]] = {}
    rooms: list[int] = []  # the keys of `room`, sorted: how much is free
    for length, left in zip(lengths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            at = bisect_left(rooms, length)
            if at == len(rooms):
                left = _open_rows(room, rooms, length, left, capacity)
                continue
            free = rooms[at]
            left = _fill_rows(room, rooms, free, length, left)
    filled = [rows for free in rooms for rows in room[free]]
    return _deal(sizes, filled)


def _open_rows(
    room: dict[int, list[_Rows]], rooms: list[int], length: int, left: int, capacity: int
) -> int:
    each = capacity // length
    whole, rest = divmod(left, each)
    for count, many in ((whole, each), (1 if rest else 0, rest)):
        if count:
            _put(room, rooms, capacity - many * length, _Rows(((length, many),), count))
    return 0


def _fill_rows(
    room: dict[int, list[_Rows]], rooms: list[int], free: int, length: int, left: int
) -> int:
    """Put up to `left` samples into rows with `free` room; return how many are left after that."""
    rows = room[free].pop()
    if not room[free]:
        del room[free]
        rooms.remove(free)
    each = min(free // length, left)
    count = min(rows.count, left // each)
    if rest := rows.count - count:
        _put(room, rooms, free, _Rows(rows.what, rest))
    _put(room, rooms, free - each * length, _Rows((*rows.what, (length, each)), count))
    return left - each * count


def _put(room: dict[int, list[_Rows]], rooms: list[int], free: int, rows: _Rows) -> None:
    if free not in room:
        room[free] = []
        insort(rooms, free)
    room[free].append(rows)


def _deal(sizes: Indices, filled: list[_Rows]) -> Bins:
    """Give the samples of each length, in order, to the rows that want one of that length."""
    pairs = np.array([pair for rows in filled for pair in rows.what], dtype=np.int64)
    widths = np.array([sum(many for _, many in rows.what) for rows in filled], dtype=np.int64)
    counts = np.array([rows.count for rows in filled], dtype=np.int64)
    patterns = np.repeat(pairs[:, 0], pairs[:, 1])
    row_sizes = np.repeat(widths, counts)
    row_starts = np.repeat(np.cumsum(widths) - widths, counts)
    slots = patterns[_ranges(row_starts, row_sizes)]
    samples = np.empty(len(sizes), dtype=np.int64)
    samples[np.argsort(slots, kind="stable")] = np.argsort(sizes, kind="stable")
    row_of_slot = np.repeat(np.arange(len(row_sizes)), row_sizes)
    samples = samples[np.lexsort((samples, row_of_slot))]
    totals = np.bincount(row_of_slot, weights=sizes[samples]).astype(np.int64)
    bins = Bins(samples, np.cumsum(row_sizes, dtype=np.int64))
    return bins.reordered(np.argsort(-totals, kind="stable").astype(np.int64))


def _ranges(starts: Indices, sizes: Indices) -> Indices:
    """The concatenation of `range(start, start + size)` for each pair."""
    total = int(sizes.sum())
    ends = np.cumsum(sizes)
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - sizes), sizes)
