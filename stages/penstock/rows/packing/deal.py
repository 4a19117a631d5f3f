"""Random samples to rows, as they come."""

import numpy as np
import numpy.typing as npt

from penstock.rows.bin_plan import Indices, Sizes, next_fit

STRETCH = 64
"""Rows that are filled one after another where all stretches are filled at the same time. The last
row of each stays emptier than the others."""

FEW = 128
"""Fewer stretches than these are not worth it."""


def deal(sizes: Sizes, level: int) -> Indices:
    """How many of the samples each row gets, filled in the order given, by next fit.

    A row has up to `level` tokens, or one sample that is longer.
    """
    num_stretches = int(sizes.sum(dtype=np.int64)) // (STRETCH * level)
    if num_stretches < FEW:
        ends = next_fit(sizes, level)
    else:
        ends = np.append(np.flatnonzero(_opens(sizes, level, num_stretches))[1:], len(sizes))
    return np.diff(ends, prepend=0)


def _opens(sizes: Sizes, level: int, num_stretches: int) -> npt.NDArray[np.bool_]:
    """Whether a sample is the first of its row, if stretches of as many samples are dealt apart."""
    # Step by step, one sample of each stretch.
    steps = -(-len(sizes) // num_stretches)
    padded = np.zeros(num_stretches * steps, dtype=sizes.dtype)
    padded[: len(sizes)] = sizes
    dealt = np.ascontiguousarray(padded.reshape(num_stretches, steps).T)
    opens = np.empty(dealt.shape, dtype=np.bool_)
    room = np.zeros(num_stretches, dtype=sizes.dtype)
    for sample, first in zip(dealt, opens, strict=True):
        np.greater(sample, room, out=first)
        np.putmask(room, first, level)
        np.maximum(room, sample, out=room)
        room -= sample
    return opens.T.ravel()[: len(sizes)]
