"""N-gram hashes of whole samples, vectorized.

An n-gram is identified by a 64-bit polynomial rolling hash of its tokens; two different n-grams
collide with probability of about 2**-64.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.rows.arrow import Tokens, flat, to_arrow
from penstock.rows.sample_order import Indices

Hashes = npt.NDArray[np.uint64]

CHUNK_TOKENS = 1 << 17
# Approximate tokens and samples that are hashed at once: they fit in the CPU cache.
CHUNK_SAMPLES = 1 << 12

_BASE = 0x9E3779B97F4A7C15
# 2**64 over the golden ratio; only odd numbers have an inverse modulo 2**64.
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)


@dataclass(frozen=True)
class TokenLists:
    """Tokens of consecutive samples; list k, `values[offsets[k]:offsets[k + 1]]`, belongs to sample
    `k // lists_per_sample`."""

    values: Tokens
    offsets: Tokens
    lists_per_sample: int

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // self.lists_per_sample


def iter_samples(batches: Iterable[pa.RecordBatch]) -> Iterator[TokenLists]:
    """Yield the samples of prepared record batches of any kind, in chunks."""
    for batch in batches:
        names = [name for name in batch.schema.names if name.endswith("input_ids")]
        sizes = sum(np.diff(flat(batch.column(name))[1]).astype(np.int64) for name in names)
        pieces = np.cumsum(sizes) // CHUNK_TOKENS + np.arange(batch.num_rows) // CHUNK_SAMPLES
        cuts = np.flatnonzero(np.diff(pieces)) + 1
        for low, high in pairwise([0, *cuts.tolist(), batch.num_rows]):
            if low < high:
                columns = [batch.column(name).slice(low, high - low) for name in names]
                yield TokenLists(*_interleave(columns), len(columns))


class NGrams(NamedTuple):
    """N-grams, in order."""

    hashes: Hashes
    samples: Indices
    """Sample index of each n-gram, from 0."""
    starts: Indices
    """Start of each n-gram in `TokenLists.values`."""


def ngram_hashes(
    samples: TokenLists, length: int, shorter: Literal["none", "whole"] = "none"
) -> NGrams:
    """All n-grams of `length` tokens.

    A list of fewer tokens has none, or with `shorter="whole"` one of all its tokens.
    """
    offsets = samples.offsets.astype(np.int64)
    sizes = np.diff(offsets)
    counts = np.maximum(sizes - length + 1, 0)
    if shorter == "whole":
        counts = np.maximum(counts, np.minimum(sizes, 1))
    of_list = np.repeat(np.arange(len(sizes)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = offsets[of_list] + within
    ends = np.minimum(starts + length, offsets[of_list + 1])
    values = samples.values
    sums = np.zeros(len(values) + 1, dtype=np.uint64)
    # splitmix64 maps 0 to 0, with which token 0 would add nothing to a polynomial.
    tokens = splitmix64(values.astype(np.uint64) + np.uint64(1))
    # Prefix sums of token * base**place, modulo 2**64: a difference is an n-gram's polynomial times
    # base**start, which the inverse takes away wherever it starts.
    np.cumsum(tokens * _powers(_BASE, len(values)), out=sums[1:])
    hashes = (sums[ends] - sums[starts]) * _powers(_BASE_INVERSE, len(values))[starts]
    hashes = splitmix64(hashes + (ends - starts).astype(np.uint64))
    return NGrams(hashes, of_list // samples.lists_per_sample, starts)


def hash_text(text: str) -> int:
    """64-bit hash of a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def splitmix64(values: Hashes) -> Hashes:
    """The finalizer of splitmix64, a bijection of 64-bit integers that mixes their bits (Steele,
    Lea and Flood, Fast splittable pseudorandom number generators, 2014)."""
    z = values
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _powers(base: int, count: int) -> Hashes:
    """base**0, base**1, … modulo 2**64."""
    factors = np.full(max(count, 1), base, dtype=np.uint64)
    factors[0] = 1
    # uint64 of NumPy wraps without an error, which is arithmetic modulo 2**64.
    return np.cumprod(factors, dtype=np.uint64)


def _interleave(columns: list[pa.ListArray]) -> tuple[Tokens, Tokens]:
    """Interleave list columns into one, so that the lists of a sample are adjacent."""
    lists = columns[0]
    if len(columns) > 1:
        count = len(lists)
        order = np.arange(len(columns) * count).reshape(len(columns), count).T.ravel()
        lists = pa.concat_arrays(columns).take(to_arrow(order))
    values, offsets = flat(lists)
    return values[offsets[0] : offsets[-1]], offsets - offsets[0]
