"""Packing plans on the histogram of lengths, and best fit decreasing.

Samples of equal length, and rows with equal content, are handled together: time grows with the
number of distinct lengths, not of samples.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.rows.bin_plan import Indices

Placement = tuple[int, int, int, int, int]
"""(length, first row, rows, each, held): each of `rows` consecutive rows gets `each` samples of
that length, after `held` other samples."""


@dataclass
class Patterns:
    """Content of rows, by sample length."""

    num_rows: int = 0
    placed: list[Placement] = field(default_factory=list[Placement])


def best_fit(counts: Indices, rooms: Sequence[tuple[int, int]], capacity: int) -> Patterns:
    """Best fit decreasing: longest samples first, each into the fullest row with room for it.

    `rooms` are (room, number of rows) of existing rows, numbered in that order, least room first;
    further rows are opened with room for `capacity`.
    """
    plan = Patterns()
    placed = plan.placed
    rows_with: dict[int, list[tuple[int, int, int]]] = {}  # room -> (first row, rows, held)
    for room, rows in rooms:
        rows_with[room] = [(plan.num_rows, rows, 0)]
        plan.num_rows += rows
    free = list(rows_with)  # sorted, because `rooms` are
    lengths = np.flatnonzero(counts)[::-1]
    for length, remaining in zip(lengths.tolist(), counts[lengths].tolist(), strict=True):
        index = bisect_left(free, length)
        while remaining:
            if index == len(free):
                # Open the rows that these samples need; the last one may not be full.
                rows = -(-remaining // (capacity // length))
                free.append(capacity)
                rows_with[capacity] = [(plan.num_rows, rows, 0)]
                plan.num_rows += rows
            room = free[index]
            stack = rows_with[room]
            first, rows, held = stack.pop()
            per_row = room // length
            if per_row > remaining:
                per_row = remaining
            filled = remaining // per_row
            if filled < rows:
                stack.append((first + filled, rows - filled, held))
            else:
                filled = rows
                if not stack:
                    del rows_with[room], free[index]
            placed.append((length, first, filled, per_row, held))
            remaining -= filled * per_row
            room -= per_row * length
            if room in rows_with:
                rows_with[room].append((first, filled, held + per_row))
            else:
                rows_with[room] = [(first, filled, held + per_row)]
                insort(free, room)
                index += 1  # the new room is shorter than the samples, unless none is left
    return plan
