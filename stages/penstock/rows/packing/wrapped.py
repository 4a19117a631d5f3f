"""Samples as one stream of tokens that is cut into full rows."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.rows.bin_plan import Indices, PackingPlan


@dataclass(frozen=True)
class Pieces:
    """Rows of pieces of samples: entry i of each array is of piece i, row after row."""

    bins: PackingPlan
    """`samples` says which sample a piece is of; a sample may have several, in neighbouring
    rows."""
    begins: Indices
    """Its first token in the sample."""
    sizes: Indices
    """Its tokens."""


def wrapped(lengths: npt.ArrayLike, capacity: int) -> Pieces:
    """Cut the samples, laid end to end in the order given, every `capacity` tokens.

    All rows but the last are full. Lengths are at least 1. This is how Megatron-LM's GPT dataset
    makes sequences of shuffled documents, and what TRL calls packing that is `wrapped`.
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
