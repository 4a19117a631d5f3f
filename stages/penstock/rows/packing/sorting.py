"""Stable sorting of whole numbers in linear time."""

import numpy as np

from penstock.rows.bins import Indices, Sizes


def order_of(values: Sizes, most: int) -> Indices:
    """Which values stand where when they are sorted; equal ones keep their order.

    They lie between 0 and `most`. Sorts 16 bits at a time, for which numpy counts instead of
    comparing: three times as fast.
    """
    order = np.argsort(values.astype(np.uint16, copy=False), kind="stable")
    for shift in range(16, most.bit_length(), 16):
        digits = (values >> shift).astype(np.uint16 if most >> shift > 255 else np.uint8)
        order = order[np.argsort(digits[order], kind="stable")]
    return order


def ranges(starts: Indices, sizes: Indices) -> Indices:
    """The concatenation of `range(start, start + size)` for each pair."""
    found = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    found += np.arange(len(found))
    return found
