"""Which lengths share a row: a plan on the histogram of lengths, and best fit decreasing on it.

Equal samples move together, and rows filled alike too: the work grows with the number of distinct
lengths, not of samples.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.rows.bin_plan import Indices

Placement = tuple[int, int, int, int, int]
"""(length, first row, rows, each, held): so many consecutive rows hold `each` samples of that
length, behind `held` others."""


@dataclass
class Patterns:
    """What rows hold, by length."""

    num_rows: int = 0
    placed: list[Placement] = field(default_factory=list[Placement])


def best_fit(counts: Indices, rooms: Sequence[tuple[int, int]], capacity: int) -> Patterns:
    """Best fit decreasing: the longest samples first, each into the fullest row with room for it.

    `rooms` are (room, rows) of rows there are already, numbered in that order with the least room
    first; further rows are opened, with room for `capacity`.
    """
    plan = Patterns()
    placed = plan.placed
    rows_with: dict[int, list[tuple[int, int, int]]] = {}  # room -> (first row, rows, held)
    for room, rows in rooms:
        rows_with[room] = [(plan.num_rows, rows, 0)]
        plan.num_rows += rows
    free = list(rows_with)  # sorted, as they are given
    lengths = np.flatnonzero(counts)[::-1]
    for length, left in zip(lengths.tolist(), counts[lengths].tolist(), strict=True):
        at = bisect_left(free, length)
        while left:
            if at == len(free):
                # As many rows as these samples fill; the last one may be filled in part.
                rows = -(-left // (capacity // length))
                free.append(capacity)
                rows_with[capacity] = [(plan.num_rows, rows, 0)]
                plan.num_rows += rows
            room = free[at]
            stack = rows_with[room]
            first, rows, held = stack.pop()
            each = room // length
            if each > left:
                each = left
            filled = left // each
            if filled < rows:
                stack.append((first + filled, rows - filled, held))
            else:
                filled = rows
                if not stack:
                    del rows_with[room], free[at]
            placed.append((length, first, filled, each, held))
            left -= filled * each
            room -= each * length
            if room in rows_with:
                rows_with[room].append((first, filled, held + each))
            else:
                rows_with[room] = [(first, filled, held + each)]
                insort(free, room)
                at += 1  # it is shorter than the samples, unless none is left
    return plan
