"""Which tokens of a row each rank of a ring holds, and which of another's its queries see.

A row is cut into twice as many equal chunks as there are ranks, wherever its documents end; a rank
holds one chunk of the first half and that one's mirror image, so that all ranks have as much causal
attention to compute. Everything follows from the documents' lengths, which every rank knows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise, product

from penstock.rows.shared_prefix import Span, first_blind_rows


@dataclass(frozen=True)
class RankTokens:
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
        return range(self.before(start), self.before(end))

    def before(self, place: int) -> int:
        """How many of its tokens come before that place in the row."""
        return sum(min(max(place - start, 0), self.chunk) for start in self.starts)


@dataclass(frozen=True)
class KVRange:
    """Tokens of one rank that tokens of another see: all of these by each of those, or less."""

    queries: range
    """The seeing rank's own numbers of its tokens."""
    keys: range
    """The other's own numbers."""
    reach: int | None = None
    """The i-th query sees these keys from number `i - reach` on; None: all."""


def own_lengths(bounds: Sequence[int], holding: RankTokens, window: int | None = None) -> list[int]:
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


def own_start_rows(spans: Sequence[Span], holding: RankTokens) -> list[int]:
    """For each token that a rank holds, the first of its own numbers that no longer sees it."""
    own = [Span(*(holding.before(place) for place in astuple(span))) for span in spans]
    return first_blind_rows(own)


def needs(
    bounds: Sequence[int],
    asker: RankTokens,
    giver: RankTokens,
    window: int | None = None,
    spans: Sequence[Span] | None = None,
) -> list[KVRange]:
    """What `asker`'s queries see of another rank's keys; under a window also what they see of its
    own, beyond what `own_lengths` tells. `spans` say of all the row's tokens how long they are
    seen, where documents branch.

    The keys of all needs together are neighbours among the giver's, but for a branch between a
    prompt and another branch.
    """
    if window is not None:
        return list(_within_window(bounds, asker, giver, window, spans))
    if asker.index == giver.index:
        return []
    # Of two ranks the chunks are nested: the one with the lower number holds the outer two. So an
    # asker sees the first chunk of a lower giver from both of its own, and both chunks of a higher
    # giver from its second; and what sees across the border between is of one document.
    border = asker.starts[0] if giver.index < asker.index else asker.starts[1]
    return [
        KVRange(asker.within(border, span.until), keys)
        for span in _document_at(border, bounds, spans)
        if span.until > border and (keys := giver.within(span.begin, min(span.end, border)))
    ]


def _document_at(place: int, bounds: Sequence[int], spans: Sequence[Span] | None) -> Sequence[Span]:
    """The spans of the document that this place in the row is in."""
    document = bisect_right(bounds, place) - 1
    begin, end = bounds[document : document + 2]
    if spans is None:
        return [Span(begin, end, end)]
    first, last = (bisect_left(spans, bound, key=_begin) for bound in (begin, end))
    return spans[first:last]


def _begin(span: Span) -> int:
    return span.begin


def _within_window(
    bounds: Sequence[int],
    asker: RankTokens,
    giver: RankTokens,
    window: int,
    spans: Sequence[Span] | None,
) -> Iterator[KVRange]:
    """One need for every two chunks, and two spans of a document in them: distances within a span
    are those in the row."""
    for chunk, held in product(asker.chunks, giver.chunks):
        for seen, seeing in product(_document_at(chunk.start, bounds, spans), repeat=2):
            # What is hidden from a branch does not part it from its prompt.
            nearer = max(0, seeing.begin - seen.end)
            start = max(chunk.start, seeing.begin)
            end = min(chunk.stop, seeing.end, seen.until)
            first_seen = start - nearer - window + 1
            keys = range(
                max(held.start, seen.begin, first_seen), min(held.stop, seen.end, chunk.start)
            )
            if start >= end or not keys:
                continue
            end = min(end, keys[-1] + nearer + window)
            reach = keys.start - first_seen
            yield KVRange(
                asker.within(start, end),
                giver.within(keys.start, keys.stop),
                reach if reach < end - start - 1 else None,
            )
