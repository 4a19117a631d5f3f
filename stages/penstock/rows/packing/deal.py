"""Next fit of samples to rows in the order given, vectorized."""

import numpy as np
import numpy.typing as npt

from penstock.rows.bin_plan import Indices, Sizes, next_fit

ROWS_PER_STRETCH = 64
"""Approximate rows per stretch. Stretches of consecutive samples are packed in parallel (SIMD); the
last row of each stretch stays emptier than the others."""

MIN_STRETCHES = 128
"""Minimum number of stretches for which packing in parallel is faster."""


def deal(sizes: Sizes, level: int) -> Indices:
    """Number of samples of each row, by next fit in the order given.

    A row has at most `level` tokens, or one longer sample.
    """
    num_stretches = int(sizes.sum(dtype=np.int64)) // (ROWS_PER_STRETCH * level)
    if num_stretches < MIN_STRETCHES:
        ends = next_fit(sizes, level)
    else:
        ends = np.append(np.flatnonzero(_opens(sizes, level, num_stretches))[1:], len(sizes))
    return np.diff(ends, prepend=0)


def _opens(sizes: Sizes, level: int, num_stretches: int) -> npt.NDArray[np.bool_]:
    """Whether each sample is the first of its row, with stretches of equally many samples."""
    # Each iteration places one sample of every stretch.
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
