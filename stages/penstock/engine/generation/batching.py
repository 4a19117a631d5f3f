"""Continuous batching for generation: which sequences a pass computes, with or without a KV cache.

T tokens of a pass, padding included.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import torch

from penstock.engine.generation.kv_cache import (
    GatherTokens,
    KVCache,
    SequencePages,
    paged_segments,
    prefill_segments,
)
from penstock.engine.generation.page_pool import PrefixKey, prefix_keys
from penstock.engine.generation.sequences import DecodingSequence
from penstock.rows.collate import MicroBatch, collate
from penstock.rows.reader import Row
from penstock.rows.schema import IGNORED
from penstock_kernels.attention import VarlenMetadata


@dataclass(frozen=True)
class Limits:
    """Batch size limits of a replica."""

    running: int
    """Sequences that are decoded together."""
    prefill_tokens: int
    """Prompt tokens in one pass; where prompts cannot be split, one is always admitted."""
    pad_to_multiple_of: int
    splits_prompts: bool
    """Whether all layers can go on from cached tokens: prompts may be computed in chunks, and begin
    with pages of others."""
    salt: bytes = b""
    """Of the keys of prefixes: what else than tokens the cache depends on."""


@dataclass(frozen=True)
class ForwardBatch:
    """One forward pass. Tensors are on the host and cover the whole replica."""

    batch: MicroBatch
    after: list[list[DecodingSequence]]
    """The sequences whose next token is sampled after each document, in order, without padding."""
    segments: Callable[[VarlenMetadata], VarlenMetadata] = lambda plain: plain
    """Converts the pass's document boundaries to what attention needs."""

    def slots_T(self) -> torch.Tensor:  # noqa: N802 - T names the dimension
        """The index of each document at its last token, if a token is sampled there; else -1."""
        slots_T = torch.full((sum(self.batch.lengths),), -1, dtype=torch.int64)
        ends = list(accumulate(self.batch.lengths))
        for number, sequences in enumerate(self.after):
            if sequences:
                slots_T[ends[number] - 1] = number
        return slots_T

    def read(self) -> list[tuple[int, DecodingSequence]]:
        """The prompts in this pass with requested logprobs: start of the document, and the first
        sequence, of each."""
        starts = (0, *accumulate(self.batch.lengths))
        return [
            (starts[number], sequences[0])
            for number, sequences in enumerate(self.after)
            if sequences
            and sequences[0].sample == 0
            and sequences[0].prompt.needs_logprobs
            and not sequences[0].tokens
        ]


@dataclass(eq=False)
class _Group:
    """Sequences with the same tokens so far: completions of one prompt, or one that goes on."""

    sequences: list[DecodingSequence]
    pages: SequencePages | None = None
    """None: nothing is computed yet."""
    keys: Sequence[PrefixKey] | None = None
    """Of the pages before its last token; None: not computed yet."""

    @property
    def tokens(self) -> list[int]:
        return self.sequences[0].all_tokens

    @property
    def computed(self) -> int:
        return 0 if self.pages is None else self.pages.length

    @property
    def decoded(self) -> list[DecodingSequence]:
        """Those that go on after their next token."""
        return [seq for seq in self.sequences if seq.needs_kv_cache]

    @property
    def is_divisible(self) -> bool:
        """Whether its prompt may be computed in parts, which give no logprobs, and whose images
        would be apart from their tokens."""
        prompt = self.sequences[0].prompt
        return bool(self.decoded) and not prompt.needs_logprobs and not prompt.images


@dataclass(frozen=True)
class _Document:
    """The next tokens of a group in a prefill pass."""

    group: _Group
    past: int
    """Tokens before them, which are in the cache."""
    tokens: list[int]

    @property
    def is_last(self) -> bool:
        """Whether the tokens end with the group's last one, after which the next is sampled."""
        return self.past + len(self.tokens) == len(self.group.tokens)


@dataclass(eq=False)
class _Running:
    """A sequence that is decoded, with all tokens but its newest in the cache."""

    sequence: DecodingSequence
    pages: SequencePages
    admitted: int


class PagedDecode:
    """Decoding with a paged KV cache: each token is computed once.

    Prompts wait until there are pages for their tokens, and are computed in chunks (prefill); after
    each such pass the running sequences decode a token, which takes a page now and then. Where
    there is none, the sequence that was admitted last gives its pages back, and its tokens are
    computed once more later (preemption by recomputation, as in vLLM).
    """

    def __init__(
        self, limits: Limits, cache: KVCache, device: torch.device, gather: GatherTokens
    ) -> None:
        self._limits, self._cache = limits, cache
        self._device, self._gather = device, gather
        self._waiting: deque[_Group] = deque()
        # By row of the recurrent states.
        self._running: list[_Running] = []
        self._num_admitted = 0
        self._must_decode = False

    def add(self, sequences: Iterable[DecodingSequence]) -> None:
        """Add sequences, of which those of a prompt are consecutive. The cache must have pages for
        each of them alone."""
        self._waiting.extend(
            _Group(list(group)) for _, group in groupby(sequences, lambda seq: seq.prompt_index)
        )

    def next_batch(self) -> ForwardBatch | None:
        """Prefill of prompts, if any can be admitted, or a decode step of all running sequences;
        None if there is nothing to do."""
        # In turn, so that long prompts do not hold up those who wait for their next token.
        batch = None if self._must_decode else self._prefill()
        self._must_decode = batch is not None and bool(self._running)
        return batch or self._decode() or self._prefill()

    def remove_finished(self) -> None:
        # Backwards: the last row, which takes the place of a removed one, has been looked at.
        for row in reversed(range(len(self._running))):
            if self._running[row].sequence.finish_reason:
                self._remove(row)
        # Those whose request has failed.
        for group in [group for group in self._waiting if group.sequences[0].finish_reason]:
            if group.pages is not None:
                self._cache.free(group.pages)
            self._waiting.remove(group)

    def _prefill(self) -> ForwardBatch | None:
        documents: list[_Document] = []
        while self._waiting and (document := self._admit(documents)):
            self._waiting.popleft()
            documents.append(document)
        if not documents:
            return None
        first_row, state_documents = len(self._running), list[int]()
        for number, document in enumerate(documents):
            if document.is_last:
                state_documents += [number] * self._run(document.group)
        for document in reversed(documents):
            if not document.is_last:
                self._waiting.appendleft(document.group)
        after = [document.group.sequences if document.is_last else [] for document in documents]
        pages = [document.group.pages for document in documents]
        if documents[0].past:
            return self._paged_batch(documents, after)
        batch = _fresh_batch(
            [(document.tokens, document.group.sequences[0]) for document in documents],
            self._limits.pad_to_multiple_of,
        )
        return ForwardBatch(
            batch,
            after,
            lambda plain: prefill_segments(
                plain, self._cache, pages, state_documents, first_row, self._device, self._gather
            ),
        )

    def _admit(self, documents: Sequence[_Document]) -> _Document | None:
        """The next document of a prefill pass, with its pages; None: what waits has to wait."""
        limits = self._limits
        running = len(self._running) + sum(len(doc.group.decoded) for doc in documents)
        room = limits.prefill_tokens - sum(len(doc.tokens) for doc in documents)
        group = self._waiting[0]
        if len(group.decoded) > limits.running - running:
            if limits.running <= running:
                return None
            count = limits.running - running
            self._waiting.insert(1, _Group(group.sequences[count:]))
            group.sequences = group.sequences[:count]
        tokens = group.tokens
        if group.keys is None:
            group.keys = self._prefix_keys(tokens) if self._shares(group) else ()
        if group.pages is None and group.decoded:
            group.pages = self._cache.find_prefix(group.keys) or self._cache.new_sequence()
        past = group.computed
        chunk = len(tokens) - past
        if self._shares(group):
            chunk = min(chunk, max(room, 0 if documents else 1))
        # Prompts without a past are computed by the kernels of training.
        is_alike = not documents or bool(past) == bool(documents[0].past)
        if not chunk or not is_alike or (documents and chunk > room):
            return None
        if group.pages is not None:
            first_reader = past or chunk
            while not self._cache.extend(group.pages, chunk, first_reader, spare=running):
                if running or documents or not self._release_waiting():
                    return None
            self._cache.remember_prefix(group.pages, group.keys)
        return _Document(group, past, tokens[past : past + chunk])

    def _shares(self, group: _Group) -> bool:
        return self._limits.splits_prompts and group.is_divisible

    def _prefix_keys(self, tokens: Sequence[int]) -> list[PrefixKey]:
        # Without the last token, which a prompt that begins alike computes for its logits.
        return prefix_keys(tokens[:-1], self._cache.page_size, self._limits.salt)

    def _run(self, group: _Group) -> int:
        """Decode the sequences of a group whose tokens are computed; their number."""
        pages = group.pages
        for seq in group.decoded:
            assert pages is not None
            own = pages if seq is group.decoded[0] else self._cache.fork(pages)
            self._num_admitted += 1
            self._running.append(_Running(seq, own, self._num_admitted))
        self._cache.reserve_states(len(self._running))
        return len(group.decoded)

    def _paged_batch(
        self, documents: Sequence[_Document], after: list[list[DecodingSequence]]
    ) -> ForwardBatch:
        pages = [document.group.pages for document in documents]
        chunks = [document.tokens for document in documents]
        positions = [document.past for document in documents]
        return self._batch_of(chunks, positions, [page for page in pages if page], after)

    def _decode(self) -> ForwardBatch | None:
        for running in sorted(self._running, key=lambda running: running.admitted):
            # It may have been preempted for an earlier one.
            while running in self._running:
                reader = running.pages.length
                self._cache.drop_hidden(running.pages, reader)
                if self._cache.extend(running.pages, 1, reader):
                    break
                if not self._release_waiting():
                    self._preempt()
        if not self._running:
            return None
        sequences = [running.sequence for running in self._running]
        return self._batch_of(
            [seq.tokens[-1:] for seq in sequences],
            [seq.position for seq in sequences],
            [running.pages for running in self._running],
            [[seq] for seq in sequences],
        )

    def _preempt(self) -> None:
        """The sequence that was admitted last waits again, before all others."""
        row = max(range(len(self._running)), key=lambda row: self._running[row].admitted)
        self._waiting.appendleft(_Group([self._remove(row)]))

    def _release_waiting(self) -> bool:
        """Give back the pages of sequences that wait; false if they have none."""
        owners = [group for group in self._waiting if group.computed]
        for group in owners:
            assert group.pages is not None
            self._cache.free(group.pages)
            group.pages = None
        return bool(owners)

    def _remove(self, row: int) -> DecodingSequence:
        removed, last = self._running[row], len(self._running) - 1
        if self._shares(_Group([removed.sequence])):
            # The next turn of a conversation begins with all of it.
            keys = self._prefix_keys(removed.sequence.all_tokens)
            self._cache.remember_prefix(removed.pages, keys)
        self._cache.free(removed.pages)
        if row != last:
            self._running[row] = self._running[last]
            self._cache.move_state(last, row)
        self._running.pop()
        return removed.sequence

    def _batch_of(
        self,
        tokens: Sequence[Sequence[int]],
        positions: Sequence[int],
        pages: Sequence[SequencePages],
        after: list[list[DecodingSequence]],
    ) -> ForwardBatch:
        """A pass of the newest tokens of sequences, from these positions on."""
        counts = [len(ids) for ids in tokens]
        batch = _paged_batch(tokens, positions, self._limits.pad_to_multiple_of)
        return ForwardBatch(
            batch,
            after,
            lambda plain: paged_segments(plain, self._cache, pages, counts, self._device),
        )


class FullRecomputeDecode:
    """Decoding without a KV cache: all tokens are recomputed for each new one. For layouts and
    position encodings that do not support a cache."""

    def __init__(self, limits: Limits) -> None:
        self._sequences: list[DecodingSequence] = []
        self._limits = limits

    def add(self, sequences: Iterable[DecodingSequence]) -> None:
        self._sequences += sequences

    def next_batch(self) -> ForwardBatch | None:
        documents: list[tuple[list[int], DecodingSequence]] = []
        room = self._limits.prefill_tokens
        for seq in self._sequences:
            tokens = seq.all_tokens
            room -= len(tokens)
            if documents and room < 0:
                break
            documents.append((tokens, seq))
        if not documents:
            return None
        batch = _fresh_batch(documents, self._limits.pad_to_multiple_of)
        return ForwardBatch(batch, [[seq] for _, seq in documents])

    def remove_finished(self) -> None:
        self._sequences = [seq for seq in self._sequences if not seq.finish_reason]


def padding_pass(pad_to_multiple_of: int) -> ForwardBatch:
    """A pass of only padding, for a replica without work: the others wait for it in every pass."""
    return ForwardBatch(_fresh_batch([], pad_to_multiple_of), [])


def _paged_batch(
    tokens: Sequence[Sequence[int]], positions: Sequence[int], pad_to_multiple_of: int
) -> MicroBatch:
    """A document of the newest tokens of each sequence, and one of padding."""
    # Without `collate`, because it is built for every token.
    counts = tuple(map(len, tokens))
    total = sum(counts)
    padding = -total % pad_to_multiple_of
    ids = [token for part in tokens for token in part]
    position_ids = [
        first + offset
        for first, count in zip(positions, counts, strict=True)
        for offset in range(count)
    ]
    return MicroBatch(
        torch.tensor([*ids, *[0] * padding]),
        torch.full((total + padding,), IGNORED),
        torch.tensor([*position_ids, *range(padding)]),
        lengths=counts + (padding,) * (padding > 0),
        num_tokens=total,
        num_trained=0,
        rows=((0, total),),
    )


def _fresh_batch(
    documents: Sequence[tuple[Sequence[int], DecodingSequence]], pad_to_multiple_of: int
) -> MicroBatch:
    """Documents from their first token on, with the images of their prompts."""
    images = tuple(image for _, seq in documents for image in seq.prompt.images)
    ids = np.fromiter((token for tokens, _ in documents for token in tokens), dtype=np.int32)
    lengths = np.array([len(tokens) for tokens, _ in documents], dtype=np.int32)
    rows = [Row(ids, np.full_like(ids, IGNORED), lengths, 0, images=images)] if documents else []
    [batch] = collate([rows], pad_to_multiple_of=pad_to_multiple_of).micro_batches()
    return batch
