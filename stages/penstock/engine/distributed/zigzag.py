"""Zigzag sharding for ring attention: the tokens of each rank, and which keys of others it needs.

A packed sequence is cut into twice as many equal chunks as there are ranks, regardless of document
boundaries; a rank holds one chunk of the first half and its mirror image, which balances causal
attention. Everything follows from the document lengths, which every rank knows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise, product

from penstock.rows.shared_prefix import Span, first_blind_rows


@dataclass(frozen=True)
class RankTokens:
    """The tokens of one rank, numbered in sequence order."""

    index: int
    ring: int
    """Ranks that share the packed sequence."""
    chunk: int
    """Tokens in a chunk."""

    @property
    def starts(self) -> tuple[int, int]:
        """The start of its two chunks in the packed sequence."""
        return self.index * self.chunk, (2 * self.ring - 1 - self.index) * self.chunk

    @property
    def chunks(self) -> tuple[range, range]:
        """Its two chunks as ranges of the packed sequence."""
        first, second = (range(start, start + self.chunk) for start in self.starts)
        return first, second

    def within(self, start: int, end: int) -> range:
        """The local indices of this rank's tokens in `start` to `end` of the packed sequence."""
        return range(self.before(start), self.before(end))

    def before(self, place: int) -> int:
        """How many of its tokens come before that position in the packed sequence."""
        return sum(min(max(place - start, 0), self.chunk) for start in self.starts)


@dataclass(frozen=True)
class KVRange:
    """Keys of one rank that queries of another attend to, fully or within a window."""

    queries: range
    """The local indices of the queries on their rank."""
    keys: range
    """The local indices of the keys on theirs."""
    reach: int | None = None
    """The i-th query sees keys from number `i - reach` on; None: all keys."""


def own_lengths(bounds: Sequence[int], holding: RankTokens, window: int | None = None) -> list[int]:
    """The lengths of the documents on a rank, counting only its own tokens.

    `bounds` are the document starts of the packed sequence, and the end of the last. A document in
    both chunks covers everything between them, so its two parts are adjacent here; not under a
    sliding window, because their distance matters there.
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
    """For each token of a rank, the first local index that no longer sees it."""
    own = [Span(*(holding.before(place) for place in astuple(span))) for span in spans]
    return first_blind_rows(own)


def needs(
    bounds: Sequence[int],
    asker: RankTokens,
    giver: RankTokens,
    window: int | None = None,
    spans: Sequence[Span] | None = None,
) -> list[KVRange]:
    """The keys of `giver` that `asker`'s queries attend to.

    Under a sliding window also its own keys beyond the documents of `own_lengths`. `spans` give how
    far each token is seen if documents have branches. The keys of all needs together are contiguous
    on the giver, except for a branch between a prompt and another branch.
    """
    if window is not None:
        return list(_within_window(bounds, asker, giver, window, spans))
    if asker.index == giver.index:
        return []
    # The chunks of two ranks are nested: the rank with the lower index holds the outer two. So an
    # asker sees the first chunk of a lower giver from both of its own chunks, and both chunks of a
    # higher giver from its second; and whatever attends across the border is in one document.
    border = asker.starts[0] if giver.index < asker.index else asker.starts[1]
    return [
        KVRange(asker.within(border, span.until), keys)
        for span in _document_at(border, bounds, spans)
        if span.until > border and (keys := giver.within(span.begin, min(span.end, border)))
    ]


def _document_at(place: int, bounds: Sequence[int], spans: Sequence[Span] | None) -> Sequence[Span]:
    """The spans of the document at this position in the packed sequence."""
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
    """One KVRange for every pair of chunks and pair of spans of a document in them.

    Distances within a span equal those in the packed sequence.
    """
    for chunk, held in product(asker.chunks, giver.chunks):
        for seen, seeing in product(_document_at(chunk.start, bounds, spans), repeat=2):
            # A hidden branch adds no distance between another branch and its prompt.
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
