"""Which tokens of a row each rank of a ring holds, and which of another's its queries see.

A row is cut into twice as many equal chunks as there are ranks, wherever its documents end; a rank
holds one chunk of the first half and that one's mirror image, so that all ranks have as much causal
attention to compute. Everything follows from the documents' lengths, which every rank knows.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Holding:
    """The tokens of one rank, numbered in the order they have in the row."""

    index: int
    ring: int
    """Ranks that share the row."""
    chunk: int
    """Tokens in a chunk."""

    @property
    def starts(self) -> tuple[int, int]:
        """Where its two chunks begin in the row."""
        return self.index * self.chunk, (2 * self.ring - 1 - self.index) * self.chunk

    @property
    def chunks(self) -> tuple[range, range]:
        """Its two chunks, in the row."""
        first, second = (range(start, start + self.chunk) for start in self.starts)
        return first, second

    def within(self, start: int, end: int) -> range:
        """Its own numbers of those tokens from `start` to `end` of the row that it holds."""
        return range(self._before(start), self._before(end))

    def _before(self, place: int) -> int:
        return sum(min(max(place - start, 0), self.chunk) for start in self.starts)


@dataclass(frozen=True)
class Need:
    """Tokens of one rank that tokens of another see: all of these by each of those, or less."""

    queries: range
    """The seeing rank's own numbers of its tokens."""
    keys: range
    """The other's own numbers."""
    reach: int | None = None
    """The i-th query sees these keys from number `i - reach` on; None: all."""


def own_lengths(bounds: Sequence[int], holding: Holding, window: int | None = None) -> list[int]:
    """The lengths of the documents that a rank holds any of, as far as it holds them.

    `bounds` are where the row's documents begin, and the end of the last. A document that is in
    both chunks holds all that lies between them, so that its two parts are neighbours here; not so
    under a window, for which their distance matters.
    """
    if window is None:
        parts = [len(holding.within(start, end)) for start, end in pairwise(bounds)]
    else:
        parts = [
            min(end, chunk.stop) - max(start, chunk.start)
            for chunk in holding.chunks
            for start, end in pairwise(bounds)
        ]
    return [length for length in parts if length > 0]


def needs(
    bounds: Sequence[int], asker: Holding, giver: Holding, window: int | None = None
) -> list[Need]:
    """What `asker`'s queries see of another rank's keys; under a window also what they see of its
    own, beyond what `own_lengths` tells.

    The keys of all needs together are neighbours among the giver's.
    """
    if window is not None:
        return list(_within_window(bounds, asker, giver, window))
    if asker.index == giver.index:
        return []
    # Of two ranks the chunks are nested: the one with the lower number holds the outer two. So an
    # asker sees the first chunk of a lower giver from both of its own, and both chunks of a higher
    # giver from its second; and what sees across the border between is of one document.
    border = asker.starts[0] if giver.index < asker.index else asker.starts[1]
    document = bisect_right(bounds, border) - 1
    keys = giver.within(bounds[document], border)
    return [Need(asker.within(border, bounds[document + 1]), keys)] if keys else []


def _within_window(
    bounds: Sequence[int], asker: Holding, giver: Holding, window: int
) -> Iterator[Need]:
    """One need for every two chunks: distances within a chunk are those in the row."""
    for chunk in asker.chunks:
        start = chunk.start
        document = bisect_right(bounds, start) - 1
        first_seen = max(bounds[document], start - window + 1)
        for held in giver.chunks:
            keys = range(max(held.start, first_seen), min(held.stop, start))
            if not keys:
                continue
            end = min(chunk.stop, bounds[document + 1], keys[-1] + window)
            reach = window - 1 - (start - keys.start)
            yield Need(
                asker.within(start, end),
                giver.within(keys.start, keys.stop),
                reach if reach < end - start - 1 else None,
            )
