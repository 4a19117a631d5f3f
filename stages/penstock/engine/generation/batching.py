"""Continuous batching for generation: prefill and decode passes, with or without a KV cache.

T tokens of a pass, padding included.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from penstock.engine.generation.kv_cache import (
    GatherTokens,
    KVCache,
    decode_segments,
    prefill_segments,
)
from penstock.engine.generation.sequences import DecodingSequence
from penstock.rows.collate import MicroBatch, collate
from penstock.rows.reader import Row
from penstock.rows.schema import IGNORED
from penstock_kernels.attention import VarlenMetadata


@dataclass(frozen=True)
class Limits:
    """Batch size limits of a replica."""

    kv_cache_tokens: int
    """The KV cache capacity in tokens; one sequence is always admitted."""
    prefill_tokens: int
    """Prompt tokens in one pass; one prompt is always admitted."""
    pad_to_multiple_of: int
    state_tokens: int = 0
    """How many tokens' keys and values are as large as the states of a sequence."""


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


class KVCachedDecode:
    """Decoding with a KV cache: each token is computed once. Prompts are admitted when there is
    room, once for all of their sequences admitted together (prefill); the other sequences decode
    one token per pass."""

    def __init__(
        self,
        sequences: Sequence[DecodingSequence],
        limits: Limits,
        device: torch.device,
        gather: GatherTokens,
    ) -> None:
        self._waiting, self._limits = deque(sequences), limits
        self._device, self._gather = device, gather
        # By cache row.
        self._active: list[DecodingSequence] = []
        self._cache = KVCache(limits.kv_cache_tokens)

    def next_batch(self) -> ForwardBatch | None:
        """Prefill of prompts, if any can be admitted, or a decode step of all sequences; None if
        there is nothing to do."""
        groups = self._admit()
        if groups:
            self._active += [seq for group in groups for seq in group if seq.needs_kv_cache]
            self._cache.longest = max((seq.max_length for seq in self._active), default=0)
            rows = [sum(seq.needs_kv_cache for seq in group) for group in groups]
            return ForwardBatch(
                _prefill_batch([group[0] for group in groups], self._limits.pad_to_multiple_of),
                groups,
                lambda plain: prefill_segments(
                    plain, self._cache, rows, self._device, self._gather
                ),
            )
        if not self._active:
            return None
        return ForwardBatch(
            _decode_batch(self._active, self._limits.pad_to_multiple_of),
            [[seq] for seq in self._active],
            lambda plain: decode_segments(plain, self._cache),
        )

    def remove_finished(self) -> None:
        # Backwards: the last row, which takes the place of a freed one, has been looked at.
        for row in reversed(range(len(self._active))):
            if self._active[row].finish_reason:
                self._cache.free(row)
                self._active[row] = self._active[-1]
                self._active.pop()

    def _admit(self) -> list[list[DecodingSequence]]:
        groups: list[list[DecodingSequence]] = []
        rows = len(self._active)
        longest = max((seq.max_length for seq in self._active), default=0)
        tokens = 0
        while self._waiting:
            seq = self._waiting[0]
            is_same = bool(groups) and groups[-1][0].prompt_index == seq.prompt_index
            tokens += 0 if is_same else len(seq.prompt.tokens)
            if seq.needs_kv_cache:
                rows, longest = rows + 1, max(longest, seq.max_length)
            # All rows are as wide as the longest sequence may become.
            row_size = longest + self._limits.state_tokens
            has_room = rows <= 1 or rows * row_size <= self._limits.kv_cache_tokens
            if not has_room or (groups and tokens > self._limits.prefill_tokens):
                break
            self._waiting.popleft()
            if is_same:
                groups[-1].append(seq)
            else:
                groups.append([seq])
        return groups


class FullRecomputeDecode:
    """Decoding without a KV cache: all tokens are recomputed for each new one. For layouts and
    position encodings that do not support a cache."""

    def __init__(self, sequences: Sequence[DecodingSequence], limits: Limits) -> None:
        self._sequences, self._limits = list(sequences), limits

    def next_batch(self) -> ForwardBatch | None:
        selected: list[DecodingSequence] = []
        tokens = 0
        for seq in self._sequences:
            tokens += len(seq.prompt.tokens) + len(seq.tokens)
            if selected and tokens > self._limits.prefill_tokens:
                break
            selected.append(seq)
        if not selected:
            return None
        batch = _prefill_batch(selected, self._limits.pad_to_multiple_of)
        return ForwardBatch(batch, [[seq] for seq in selected])

    def remove_finished(self) -> None:
        self._sequences = [seq for seq in self._sequences if not seq.finish_reason]


def padding_pass(pad_to_multiple_of: int) -> ForwardBatch:
    """A pass of only padding, for a replica without work: the others wait for it in every pass."""
    return ForwardBatch(_prefill_batch([], pad_to_multiple_of), [])


def _decode_batch(sequences: Sequence[DecodingSequence], pad_to_multiple_of: int) -> MicroBatch:
    """A decode step: a document of the newest token of each sequence, and one of padding."""
    # Without `collate`, because it is built for every token.
    count = len(sequences)
    padding = -count % pad_to_multiple_of
    ids = [*(seq.tokens[-1] for seq in sequences), *[0] * padding]
    positions = [seq.position for seq in sequences]
    return MicroBatch(
        torch.tensor(ids),
        torch.full((len(ids),), IGNORED),
        torch.tensor([*positions, *range(padding)]),
        lengths=(1,) * count + (padding,) * (padding > 0),
        num_tokens=count,
        num_trained=0,
        rows=((0, count),),
    )


def _prefill_batch(sequences: Sequence[DecodingSequence], pad_to_multiple_of: int) -> MicroBatch:
    documents = [[*seq.prompt.tokens, *seq.tokens] for seq in sequences]
    images = tuple(image for seq in sequences for image in seq.prompt.images)
    ids = np.fromiter((token for document in documents for token in document), dtype=np.int32)
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    rows = [Row(ids, np.full_like(ids, IGNORED), lengths, 0, images=images)] if documents else []
    [batch] = collate([rows], pad_to_multiple_of=pad_to_multiple_of).micro_batches()
    return batch
