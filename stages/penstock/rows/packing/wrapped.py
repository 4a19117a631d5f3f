"""Wrapped packing: concatenate samples and split the token stream into full rows."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.rows.bin_plan import Indices, PackingPlan


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
