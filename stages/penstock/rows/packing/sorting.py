"""Stable sorting and counting of integers in linear time.

Temporary arrays have at most `PART` numbers where possible, so that they stay in the CPU cache:
allocating large ones costs more than the computation.
"""

import numpy as np

from penstock.rows.bin_plan import Indices, Sizes

PART = 1 << 15


def count_values(values: Sizes, most: int) -> Indices:
    """Number of occurrences of each value from 0 to `most`."""
    counts = np.zeros(most + 1, dtype=np.int64)
    for first in range(0, len(values), PART):
        counts += np.bincount(values[first : first + PART], minlength=most + 1)
    return counts


def stable_argsort(values: Sizes, most: int) -> Indices:
    """Stable argsort of values between 0 and `most`.

    Radix sort, 16 bits at a time, for which numpy counts instead of comparing: three times as fast.
    """
    order = np.argsort(values.astype(np.uint16, copy=False), kind="stable")
    for shift in range(16, most.bit_length(), 16):
        digits = (values >> shift).astype(np.uint16 if most >> shift > 255 else np.uint8)
        order = order[np.argsort(digits[order], kind="stable")]
    return order


def ranges(starts: Indices, sizes: Indices) -> Indices:
    """The concatenation of `range(start, start + size)` for each pair."""
    ends = np.cumsum(sizes)
    shifts = starts - ends + sizes
    indices = np.arange(int(ends[-1]) if len(ends) else 0)
    for first in range(0, len(ends), PART):
        part = slice(first, first + PART)
        start = int(ends[first] - sizes[first])
        added = np.repeat(shifts[part], sizes[part])
        indices[start : start + len(added)] += added
    return indices
