"""Paged KV cache for generation: pages of sequences, and the passes that fill and read them.

Layers of one kind, with one sliding window or none, share the tables of their pages. Layers with
recurrent states keep one state for each running sequence.

T tokens of a pass, B sequences, P pages of S tokens, K key and value heads, N query heads, H head
width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, chain, count
from typing import NamedTuple

import torch

from penstock.engine.generation.page_pool import PagePool, PrefixKey
from penstock.models.layers.attention import AttentionFn, DecodeSegments, PrefillSegments
from penstock.models.layers.autocast import as_autocast
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.attention.paged import PagedSequences, paged_attention
from penstock_kernels.to_device import to_device

STATES = "states of the current layer"

Window = int | None
"""A kind of layers: those with this sliding window, or without one."""

GatherTokens = Callable[[torch.Tensor], torch.Tensor]
"""Returns all tokens of a pass, given those of this rank."""


@dataclass
class SequencePages:
    """The pages of one sequence."""

    tables: Mapping[Window, list[int]]
    """Page numbers by position. Those before `first_page` are released."""
    first_page: dict[Window, int]
    length: int = 0
    """Tokens that are in the cache, or will be after the pass that is being built."""


class _Layer(NamedTuple):
    window: Window
    parts: tuple[torch.Tensor, ...]
    """[P, S, K, H] each: keys and values, or one tensor for both."""


class KVCache:
    """The memory of all layers, and the pools of its pages."""

    def __init__(self, num_pages: Mapping[Window, int], page_size: int, *, adjacent: bool) -> None:
        """`adjacent`: see `PagePool`."""
        self.page_size = page_size
        self.pools = {
            window: PagePool(pages, adjacent=adjacent) for window, pages in num_pages.items()
        }
        # In the order in which attention runs, which is the same in every pass.
        self._layers: list[_Layer] = []
        self._copies: list[tuple[Window, int, int]] = []
        # [rows, ...] of each layer that has any, with rows in use first.
        self._states: list[tuple[torch.Tensor, ...]] = []
        self._state_rows = 0

    def kind_of(self, window: Window) -> Window:
        """The pool of layers with this window. transformers' own code names its windows in calls
        alone: such layers have pages for all tokens."""
        return window if window in self.pools else None

    # Pages.

    def new_sequence(self) -> SequencePages:
        return SequencePages({window: [] for window in self.pools}, dict.fromkeys(self.pools, 0))

    def extend(
        self, pages: SequencePages, tokens: int, first_reader: int, *, spare: int = 0
    ) -> bool:
        """Take pages for further tokens of a sequence; False if there are not enough, with `spare`
        ones to be left, and nothing has changed.

        `first_reader` is the position of the first token that will read this cache: what its
        window hides needs no page.
        """
        size, end = self.page_size, pages.length + tokens
        plans: dict[Window, tuple[range, bool]] = {}
        for window, pool in self.pools.items():
            table = pages.tables[window]
            first = 0 if window is None else max(0, first_reader - window + 1) // size
            new = range(max(len(table), first), -(-end // size))
            # The last page is written again: only by its last sequence.
            writes_shared = pages.length % size > 0 and pool.is_shared(table[-1])
            if len(new) + writes_shared + spare > pool.available:
                return False
            plans[window] = new, writes_shared
        for window, (new, writes_shared) in plans.items():
            pool, table = self.pools[window], pages.tables[window]
            if writes_shared:
                page = pool.take(table[-1])
                self._copies.append((window, table[-1], page))
                pool.release(table[-1])
                table[-1] = page
            if new.start > len(table):
                table += [0] * (new.start - len(table))
                pages.first_page[window] = new.start
            for _ in new:
                has_page = len(table) > pages.first_page[window]
                table.append(pool.take(table[-1] if has_page else None))
        pages.length = end
        return True

    def drop_hidden(self, pages: SequencePages, first_reader: int) -> None:
        """Release the pages that no token from `first_reader` on sees."""
        for window, pool in self.pools.items():
            if window is None:
                continue
            table, first = pages.tables[window], pages.first_page[window]
            visible = max(
                first, min(max(0, first_reader - window + 1) // self.page_size, len(table))
            )
            for page in table[first:visible]:
                pool.release(page)
            pages.first_page[window] = visible

    def fork(self, pages: SequencePages) -> SequencePages:
        """A sequence with the same tokens so far. Pages are copied when one of both writes."""
        for window, pool in self.pools.items():
            for page in pages.tables[window][pages.first_page[window] :]:
                pool.share(page)
        tables = {window: list(table) for window, table in pages.tables.items()}
        return SequencePages(tables, dict(pages.first_page), pages.length)

    def free(self, pages: SequencePages) -> None:
        for window, pool in self.pools.items():
            # Backwards: of a prefix that is kept, the beginning is needed first.
            for page in reversed(pages.tables[window][pages.first_page[window] :]):
                pool.release(page)

    def find_prefix(self, keys: Sequence[PrefixKey]) -> SequencePages | None:
        """A sequence that begins with as many of these whole pages as are in the cache."""
        size = self.page_size
        hits = {window: [pool.find(key) for key in keys] for window, pool in self.pools.items()}
        # Without a window a sequence needs all of its pages.
        unbroken = [
            pages.index(None) if None in pages else len(pages)
            for window, pages in hits.items()
            if window is None
        ]
        for num_pages in range(min(unbroken, default=len(keys)), 0, -1):
            firsts = {
                window: 0 if window is None else max(0, num_pages * size - window + 1) // size
                for window in hits
            }
            if all(None not in pages[firsts[w] : num_pages] for w, pages in hits.items()):
                break
        else:
            return None
        result = self.new_sequence()
        result.length = num_pages * size
        for window, pool in self.pools.items():
            first = result.first_page[window] = firsts[window]
            table = result.tables[window]
            table += [0] * first
            for page in hits[window][first:num_pages]:
                assert page is not None
                pool.share(page)
                table.append(page)
        return result

    def remember_prefix(self, pages: SequencePages, keys: Sequence[PrefixKey]) -> None:
        """The num_pages pages of the sequence may be found by these keys."""
        for window, pool in self.pools.items():
            table, num_pages = pages.tables[window], pages.length // self.page_size
            for number in range(pages.first_page[window], min(len(keys), num_pages)):
                pool.remember(table[number], keys[number])

    # Memory.

    def copy_pages(self) -> None:
        """Copy the pages that sequences no longer share."""
        for window, source, target in self._copies:
            for layer in self._layers:
                if layer.window == window:
                    for x_PSKH in layer.parts:
                        x_PSKH[target] = x_PSKH[source]
        self._copies.clear()

    def layer(self, number: int, parts: Sequence[torch.Tensor], window: Window) -> _Layer:
        """A layer's memory for parts like these, [T, K, H] each. It is allocated on first use with
        the device and dtype of the input, and not written: no backend reads a slot before a token
        is in it."""
        if number == len(self._layers):
            shape = self.pools[window].count, self.page_size
            memory = (as_autocast(x).new_empty((*shape, *x.shape[1:])) for x in parts)
            self._layers.append(_Layer(window, tuple(memory)))
        return self._layers[number]

    def states(self, layer: int, like: Sequence[torch.Tensor] = ()) -> tuple[torch.Tensor, ...]:
        """The states of a layer, [rows, ...] each, by its order among those that have any. They are
        allocated on first use `like` the states of documents."""
        if layer == len(self._states):
            self._states.append(
                tuple(tensor.new_zeros((self._state_rows, *tensor.shape[1:])) for tensor in like)
            )
        return self._states[layer]

    def reserve_states(self, rows: int) -> None:
        """Allocate states for so many running sequences."""
        if rows <= self._state_rows:
            return
        # Grow by half each time, so that the total cost of copies stays linear.
        self._state_rows = max(rows, self._state_rows * 3 // 2)
        for layer, tensors in enumerate(self._states):
            grown = tuple(x.new_zeros((self._state_rows, *x.shape[1:])) for x in tensors)
            for new, old in zip(grown, tensors, strict=True):
                new[: len(old)] = old
            self._states[layer] = grown

    def move_state(self, source: int, target: int) -> None:
        """The last running sequence takes the row of one that ended."""
        for state in chain.from_iterable(self._states):
            state[target] = state[source]


class _Slots(NamedTuple):
    """Where the tokens of a pass go in the layers of one kind."""

    tokens: torch.Tensor | None
    """int64 [E]: the tokens that are kept; None: the first E."""
    slots: torch.Tensor
    """int64 [E]: page * S + token of the page."""

    def store(self, layer: _Layer, parts: Sequence[torch.Tensor]) -> None:
        for x_PSKH, x_TKH in zip(layer.parts, parts, strict=True):
            x_EKH = x_TKH[: len(self.slots)] if self.tokens is None else x_TKH[self.tokens]
            x_PSKH.flatten(0, 1).index_copy_(0, self.slots, x_EKH.to(x_PSKH.dtype))


@dataclass(frozen=True, eq=False)
class Prefill(PrefillSegments):
    """Prefill: documents without cached tokens, whose keys and values go into the cache."""

    cache: KVCache
    slots: Mapping[Window, _Slots]
    gather: GatherTokens
    documents: torch.Tensor
    """int64 [R]: the document of each new row of states."""
    first_row: int
    calls: "count[int]" = field(default_factory=count)
    state_calls: "count[int]" = field(default_factory=count)

    def store(self, k_TKH: torch.Tensor, v_TKH: torch.Tensor, window: Window = None) -> None:
        parts, kind = _parts(k_TKH, v_TKH), self.cache.kind_of(window)
        self.slots[kind].store(self.cache.layer(next(self.calls), parts, kind), parts)

    def store_latents(self, x_S1H: torch.Tensor) -> None:
        """Cache what the heads of the current layer share, of this rank's tokens."""
        x_T1H = self.gather(x_S1H)
        self.store(x_T1H, x_T1H)

    def store_states(self, *states: torch.Tensor) -> None:
        rows = slice(self.first_row, self.first_row + len(self.documents))
        for cached, state in zip(
            self.cache.states(next(self.state_calls), states), states, strict=True
        ):
            cached[rows] = state[self.documents]

    def uncached(self) -> VarlenMetadata:
        return VarlenMetadata(**{field.name: getattr(self, field.name) for field in _PLAIN})


@dataclass(frozen=True, eq=False)
class PagedPass(DecodeSegments):
    """The newest tokens of sequences whose earlier ones are in the cache, followed by padding: one
    token each in a decode step, several in a chunk of a prompt."""

    cache: KVCache
    sequences: Mapping[Window, PagedSequences]
    slots: Mapping[Window, _Slots]
    queries: int
    """Tokens before padding."""
    calls: "count[int]" = field(default_factory=count)
    state_calls: "count[int]" = field(default_factory=count)

    def attend(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        scale: float,
        window: Window,
        sinks_N: torch.Tensor | None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Cache the keys and values of the new tokens, and attend to all of their sequences, [T, N,
        H]; zeros for padding."""
        kind = self.cache.kind_of(window)
        layer = self._append(_parts(k_TKH, v_TKH), kind)
        settings = scale, window, sinks_N, soft_cap
        keys, values = layer.parts[0], layer.parts[-1]
        y_QNH = paged_attention(
            q_TNH[: self.queries], keys, values, self.sequences[kind], *settings
        )
        if self.queries == len(q_TNH):
            return y_QNH
        return torch.cat((y_QNH, torch.zeros_like(q_TNH[self.queries :], dtype=y_QNH.dtype)))

    def append_latents(self, x_T1H: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Cache what the heads of the current layer share, of the new tokens, and return all."""
        [x_PS1H] = self._append((x_T1H,), None).parts
        tables_BM, _, lengths_B = self.sequences[None].index_tensors()
        x_BCH = x_PS1H[tables_BM].flatten(1, 2).squeeze(2)
        visible_BC = torch.arange(x_BCH.shape[1], device=x_BCH.device) < lengths_B[:, None]
        # Slots behind a sequence's last token are not written: what is masked must be finite.
        return x_BCH.masked_fill(~visible_BC.unsqueeze(-1), 0), visible_BC

    def states(self) -> tuple[torch.Tensor, ...]:
        layer_states = self.cache.states(next(self.state_calls))
        self.memo[STATES] = tuple(state[: self.queries] for state in layer_states)
        return self.memo[STATES]

    def replace_states(self, *states: torch.Tensor) -> None:
        for cached, state in zip(self.memo[STATES], states, strict=True):
            cached.copy_(state)

    def _append(self, parts: Sequence[torch.Tensor], window: Window) -> _Layer:
        layer = self.cache.layer(next(self.calls), parts, window)
        self.slots[window].store(layer, parts)
        return layer


def prefill_segments(
    segments: VarlenMetadata,
    cache: KVCache,
    documents: Sequence[SequencePages | None],
    state_documents: Sequence[int],
    first_row: int,
    device: torch.device,
    gather: GatherTokens = lambda x_T: x_T,
) -> VarlenMetadata:
    """Segments of a prefill pass. The first documents are kept in these pages; None: not kept.
    `state_documents` are those of the rows of states from `first_row` on."""
    if not any(documents):
        return segments
    starts = (0, *accumulate(segments.lengths))
    cached = [(start, pages) for start, pages in zip(starts, documents, strict=False) if pages]
    slots: dict[Window, _Slots] = {}
    for window in cache.pools:
        tokens, targets = list[int](), list[int]()
        for start, pages in cached:
            first = pages.first_page[window] * cache.page_size
            tokens += range(start + first, start + pages.length)
            targets += _slots_of(cache, pages, window, first)
        slots[window] = _Slots(*(to_device(torch.tensor(x), device) for x in (tokens, targets)))
    return Prefill(
        **vars(segments),
        cache=cache,
        slots=slots,
        gather=gather,
        documents=to_device(torch.tensor(state_documents, dtype=torch.int64), device),
        first_row=first_row,
    )


def paged_segments(
    segments: VarlenMetadata,
    cache: KVCache,
    sequences: Sequence[SequencePages],
    num_queries: Sequence[int],
    device: torch.device,
) -> PagedPass:
    """Segments of a pass of the newest tokens of these sequences, which have their pages."""
    cache.copy_pages()
    lengths = [pages.length for pages in sequences]
    metadata: dict[Window, PagedSequences] = {}
    slots: dict[Window, _Slots] = {}
    for window in cache.pools:
        tables = [pages.tables[window] for pages in sequences]
        metadata[window] = PagedSequences(cache.page_size, tables, num_queries, lengths, device)
        targets = [
            slot
            for pages, queries in zip(sequences, num_queries, strict=True)
            for slot in _slots_of(cache, pages, window, pages.length - queries)
        ]
        slots[window] = _Slots(None, to_device(torch.tensor(targets), device))
    return PagedPass(
        **vars(segments),
        cache=cache,
        sequences=metadata,
        slots=slots,
        queries=sum(num_queries),
    )


def with_kv_cache(attend: AttentionFn) -> AttentionFn:
    """Wrap `attend` to fill or read the KV cache in prefill and decode passes."""

    def attend_with_cache(
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        segments: VarlenMetadata,
        scale: float,
        window: int | None = None,
        sinks_N: torch.Tensor | None = None,
        soft_cap: float | None = None,
        /,
    ) -> torch.Tensor:
        if isinstance(segments, PagedPass):
            return segments.attend(q_TNH, k_TKH, v_TKH, scale, window, sinks_N, soft_cap)
        if isinstance(segments, Prefill):
            segments.store(k_TKH, v_TKH, window)
        return attend(q_TNH, k_TKH, v_TKH, segments, scale, window, sinks_N, soft_cap)

    return attend_with_cache


def _slots_of(cache: KVCache, pages: SequencePages, window: Window, first: int) -> list[int]:
    """The slots of a sequence's tokens from position `first` on."""
    table, size = pages.tables[window], cache.page_size
    return [table[i // size] * size + i % size for i in range(first, pages.length)]


def _parts(k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (k_TKH,) if v_TKH is k_TKH else (k_TKH, v_TKH)


_PLAIN = fields(VarlenMetadata)
