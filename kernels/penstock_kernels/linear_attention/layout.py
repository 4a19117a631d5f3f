"""Chunks of packed documents, in the order in which a CPU computes them.

The first chunks of several documents are a batch, then their second chunks, and so on. Batches are
small: what is computed of one is to stay in the processor's caches.
"""

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

CHUNK = 32
"""Tokens of a chunk. With half as many as on a GPU, products within chunks cost half as much, and
short documents less padding."""


class Batch(NamedTuple):
    """Chunks that are computed at once, one of each of several documents."""

    documents: tuple[int, ...]
    tokens: tuple[slice, ...]
    """Of each: a chunk, or less at a document's end."""
    is_first: bool
    """Whether they are their documents' first."""
    is_last: bool
    """Whether they are their documents' last."""


@lru_cache(maxsize=8)
def batches_of(lengths: tuple[int, ...], most: int, chunk: int) -> tuple[Batch, ...]:
    """For documents of these lengths, batches of at most so many, each after those that its states
    come from. Found once for all layers."""
    ends = [*accumulate(lengths)]
    batches = []
    for first in range(0, max(lengths), chunk):
        longer = [document for document, length in enumerate(lengths) if length > first + chunk]
        ending = [
            document for document, length in enumerate(lengths) if first < length <= first + chunk
        ]
        for documents, is_last in ((longer, False), (ending, True)):
            for low in range(0, len(documents), most):
                some = tuple(documents[low : low + most])
                starts = [ends[document] - lengths[document] + first for document in some]
                tokens = tuple(
                    slice(start, min(start + chunk, ends[document]))
                    for start, document in zip(starts, some, strict=True)
                )
                batches.append(Batch(some, tokens, first == 0, is_last))
    return tuple(batches)
