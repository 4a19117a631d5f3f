"""Zigzag sharding for ring attention: the tokens of each rank, and which keys of others it needs.

A packed sequence is cut into twice as many equal chunks as there are ranks, regardless of document
boundaries; a rank holds one chunk of the first half and its mirror image, which balances causal
attention. Everything follows from the document lengths, which every rank knows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise, product
from operator import attrgetter

from penstock.rows.shared_prefix import Span, first_blind_rows

Run = tuple[int, int]
"""The first of the tokens that attend to one another in both directions, and the end of them."""


@dataclass(frozen=True)
class RankTokens:
    """The tokens of rank `index` of `ring`, two chunks of `chunk` tokens, in sequence order."""

    index: int
    ring: int
    chunk: int

    @property
    def starts(self) -> tuple[int, int]:
        return self.index * self.chunk, (2 * self.ring - 1 - self.index) * self.chunk

    @property
    def chunks(self) -> tuple[range, range]:
        first, second = (range(start, start + self.chunk) for start in self.starts)
        return first, second

    def local_range(self, start: int, end: int) -> range:
        """The local indices of this rank's tokens in `start` to `end` of the packed sequence."""
        return range(self.count_before(start), self.count_before(end))

    def count_before(self, position: int) -> int:
        """How many of its tokens come before that position in the packed sequence."""
        return sum(min(max(position - start, 0), self.chunk) for start in self.starts)


def chunk_order(ring: int) -> list[int]:
    """The chunks of the packed sequence in the order in which ranks have them."""
    return [chunk for index in range(ring) for chunk in (index, 2 * ring - 1 - index)]


@dataclass(frozen=True)
class KVRange:
    """Keys of one rank that queries of another attend to, fully or within a window."""

    queries: range
    """The local indices of the queries on their rank."""
    keys: range
    """The local indices of the keys on theirs."""
    reach: int | None = None
    """The i-th query sees keys from number `i - reach` on; None: all keys."""


def local_lengths(
    bounds: Sequence[int], rank_tokens: RankTokens, window: int | None = None
) -> list[int]:
    """The lengths of the documents on a rank, counting only its own tokens.

    `bounds` are the document starts of the packed sequence, and the end of the last. A document in
    both chunks covers everything between them, so its two parts are adjacent here; not under a
    sliding window, because their distance matters there.
    """
    if window is None:
        parts = [len(rank_tokens.local_range(start, end)) for start, end in pairwise(bounds)]
    else:
        parts = [
            min(end, chunk.stop) - max(start, chunk.start)
            for chunk in rank_tokens.chunks
            for start, end in pairwise(bounds)
        ]
    return [length for length in parts if length > 0]


def local_start_rows(spans: Sequence[Span], rank_tokens: RankTokens) -> list[int]:
    """For each token of a rank, the first local index that no longer sees it."""
    return first_blind_rows([Span(*map(rank_tokens.count_before, astuple(s))) for s in spans])


def local_runs(
    runs: Sequence[Run], rank_tokens: RankTokens, window: int | None = None
) -> list[Run]:
    """The parts of bidirectional runs on a rank, within one document of `local_lengths` each."""
    parts = [range(*run) for run in runs]
    if window is not None:
        parts = [
            range(max(part.start, chunk.start), min(part.stop, chunk.stop))
            for chunk in rank_tokens.chunks
            for part in parts
        ]
    own = [rank_tokens.local_range(part.start, part.stop) for part in parts if part]
    return [(part.start, part.stop) for part in own if part]


def kv_ranges(
    bounds: Sequence[int],
    query_rank: RankTokens,
    kv_rank: RankTokens,
    window: int | None = None,
    spans: Sequence[Span] | None = None,
    bidirectional: Sequence[Run] = (),
) -> list[KVRange]:
    """The keys of `kv_rank` that `query_rank`'s queries attend to.

    Under a sliding window also its own keys beyond the documents of `local_lengths`. `spans` give
    how far each token is seen if documents have branches. The keys of all ranges together are
    contiguous on their rank, except for a branch between a prompt and another branch. In
    `bidirectional` runs queries attend to later keys too.
    """
    if window is not None:
        later = _later_in_runs(bidirectional, query_rank, kv_rank)
        return [*_within_window(bounds, query_rank, kv_rank, window, spans), *later]
    if query_rank.index == kv_rank.index:
        return []
    # The chunks of two ranks are nested: the rank with the lower index holds the outer two. So
    # queries see the first chunk of a lower key rank from both of their chunks, and both chunks of
    # a higher key rank from their second; and what attends across the border is in one document.
    border = query_rank.starts[0] if kv_rank.index < query_rank.index else query_rank.starts[1]
    earlier = [
        KVRange(query_rank.local_range(border, span.until), keys)
        for span in _document_at(border, bounds, spans)
        if span.until > border and (keys := kv_rank.local_range(span.begin, min(span.end, border)))
    ]
    return [*earlier, *_later_in_runs(bidirectional, query_rank, kv_rank)]


def _later_in_runs(
    runs: Sequence[Run], query_rank: RankTokens, kv_rank: RankTokens
) -> Iterator[KVRange]:
    for chunk, kv_chunk in product(query_rank.chunks, kv_rank.chunks):
        if kv_chunk.start < chunk.stop:
            continue
        for first, end in runs:
            queries = query_rank.local_range(max(first, chunk.start), min(end, chunk.stop))
            keys = kv_rank.local_range(max(first, kv_chunk.start), min(end, kv_chunk.stop))
            if queries and keys:
                yield KVRange(queries, keys)


def _document_at(
    position: int, bounds: Sequence[int], spans: Sequence[Span] | None
) -> Sequence[Span]:
    document = bisect_right(bounds, position) - 1
    begin, end = bounds[document : document + 2]
    if spans is None:
        return [Span(begin, end, end)]
    first, last = (bisect_left(spans, bound, key=attrgetter("begin")) for bound in (begin, end))
    return spans[first:last]


def _within_window(
    bounds: Sequence[int],
    query_rank: RankTokens,
    kv_rank: RankTokens,
    window: int,
    spans: Sequence[Span] | None,
) -> Iterator[KVRange]:
    """One KVRange for every pair of chunks and pair of spans of a document in them.

    Distances within a span equal those in the packed sequence.
    """
    for chunk, kv_chunk in product(query_rank.chunks, kv_rank.chunks):
        # Keys end at the chunk's start (`keys` below), and attention stays within a document: so
        # only the document that holds this start has both keys and queries.
        for key_span, query_span in product(_document_at(chunk.start, bounds, spans), repeat=2):
            # A hidden branch adds no distance between another branch and its prompt.
            branch_gap = max(0, query_span.begin - key_span.end)
            start = max(chunk.start, query_span.begin)
            end = min(chunk.stop, query_span.end, key_span.until)
            first_key = start - branch_gap - window + 1
            keys = range(
                max(kv_chunk.start, key_span.begin, first_key),
                min(kv_chunk.stop, key_span.end, chunk.start),
            )
            if start >= end or not keys:
                continue
            # Queries after this one see none of these keys.
            end = min(end, keys[-1] + branch_gap + window)
            # The first query sees keys from `first_key` on: where the range begins later, so many
            # further queries see all of it.
            reach = keys.start - first_key
            yield KVRange(
                query_rank.local_range(start, end),
                kv_rank.local_range(keys.start, keys.stop),
                reach if reach < end - start - 1 else None,
            )
