"""The queries of sparse attention, in chunks that end with documents.

C queries of a chunk, M keys up to its last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from penstock_kernels.attention.segments import VarlenMetadata


@dataclass(frozen=True, eq=False)
class PartialSegments(VarlenMetadata):
    """Documents of all tokens, whose keys are here, where only some of the queries are."""

    queries: tuple[range, ...] = field(kw_only=True)
    """The tokens that are the rows of the queries, in order."""


class Chunk(NamedTuple):
    """Queries of one document."""

    first: int
    """The first token of their document."""
    start: int
    end: int
    """The first of the tokens, and the one after the last."""
    row: int
    """The row of the first one among the queries."""

    @property
    def rows(self) -> slice:
        """The rows of the queries."""
        return slice(self.row, self.row + self.end - self.start)

    @property
    def keys(self) -> slice:
        """The tokens up to the last query."""
        return slice(self.first, self.end)


def query_ranges(segments: VarlenMetadata) -> list[int]:
    """The tokens that are queries, as start and end of each range of them."""
    if not isinstance(segments, PartialSegments):
        return [0, segments.num_tokens]
    return [border for tokens in segments.queries for border in (tokens.start, tokens.stop)]


def query_chunks(
    lengths: Sequence[int], ranges: Sequence[int], pairs: int | None = None
) -> Iterator[Chunk]:
    """The chunks, in the order of rows, of at most `pairs` pairs of a query and a key of its
    document, if that is more than one query. `ranges` are those of `query_ranges`."""
    row = 0
    for begin, stop in zip(ranges[::2], ranges[1::2], strict=True):
        for first, last in pairwise((0, *accumulate(lengths))):
            low, high = max(first, begin), min(last, stop)
            size = max(1, high - low if pairs is None else pairs // (last - first))
            for start in range(low, high, size):
                end = min(start + size, high)
                yield Chunk(first, start, end, row)
                row += end - start
