"""Worst fit: the next sample goes to the row with the most room, in groups of samples."""

from heapq import heappush, heapreplace

import numpy as np
import numpy.typing as npt

from penstock.rows.bin_plan import PackingPlan, join


def greedy(lengths: npt.ArrayLike, capacity: int, group_size: int) -> PackingPlan:
    """Pack samples in the order given, `group_size` consecutive samples at a time.

    Each sample goes to the row of its group with the most room (of several, the oldest); if it does
    not fit there, it opens a row. No sample may be longer than `capacity`. Rows are in the order in
    which they were opened. Equal to ERNIEKit's `greedy_intokens`, which uses groups of 500.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    starts = range(0, len(sizes), group_size)
    return join(
        [_group(sizes[start : start + group_size], capacity, start) for start in starts]
        or [PackingPlan(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))]
    )


def _group(sizes: npt.NDArray[np.int64], capacity: int, first: int) -> PackingPlan:
    rows: list[list[int]] = []
    heap: list[tuple[int, int]] = []
    """(-room, row) of every row; the row with the most room comes first."""
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
