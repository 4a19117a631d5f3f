"""Documents of a packed micro-batch, and their layout for attention.

Documents of similar length form a bucket: each is padded on the right to the bucket's longest, and
attention runs once per bucket. Padding on the right needs no mask, because causal attention never
attends to the right; outputs of padding are dropped.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from penstock_kernels.to_device import to_device

TOLERATED_SHARE = 0.2
"""A document joins a bucket if at most this fraction of the bucket's width would be padding ..."""
TOLERATED_TOKENS = 16
"""... or at most this many tokens: for short documents a call costs more than the padding."""


@dataclass(frozen=True)
class LengthBucket:
    """Documents that are processed in one call, as rows of `width` tokens."""

    num_documents: int
    width: int

    @property
    def num_slots(self) -> int:
        """Tokens in the bucket's rows, padding included."""
        return self.num_documents * self.width


@dataclass(frozen=True, eq=False)
class Layout:
    """The buckets' rows as one list of slots, if it differs from the tokens in order."""

    token_of_slot: torch.Tensor
    """int64 [S]: the token in each slot; a padding slot names its document's last token."""
    slot_of_token: torch.Tensor
    """int64 [T]: the slot of each token."""
    is_padding: torch.Tensor
    """bool [S]."""


@dataclass(frozen=True, eq=False)
class VarlenMetadata:
    """The documents of one micro-batch. Built once, used by every layer."""

    lengths: tuple[int, ...]
    """Tokens of each document, in order."""
    num_tokens: int
    """T, tokens in the micro-batch. Kept: to a compiler a sum over the documents is all of them."""
    max_length: int
    cu_seqlens: torch.Tensor
    """cu_seqlens: int32 [documents + 1] on the device."""
    buckets: tuple[LengthBucket, ...]
    """Longest first."""
    start_rows: torch.Tensor | None
    """int32 [T] on the device: for each token the first one that no longer sees it, though it comes
    later in the document. None where a token sees all of its document's past."""
    run_ends: torch.Tensor | None = field(default=None, kw_only=True)
    """int32 [T] on the device: for each token the first later one that it does not see: the end of
    its bidirectional run, or the next token. None without such runs."""
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, kw_only=True)
    """Values that backends compute once for all layers."""

    @property
    def layout(self) -> Layout | None:
        """None if the documents are one bucket in order: nothing needs to be copied."""
        if len(set(self.lengths)) == 1:
            return None
        if "layout" not in self.memo:
            groups, device = _groups(self.lengths), self.cu_seqlens.device
            self.memo["layout"] = _layout(groups, self.buckets, self.lengths, device)
        return self.memo["layout"]

    def effective_window(self, window: int | None) -> int | None:
        """The window, if it masks a token of some document; else None.

        Raises:
            ValueError: the window is below 1.
        """
        if window is not None and window < 1:
            raise ValueError(
                f"a window of {window} tokens shows a token nothing; it has at least 1"
            )
        return None if window is None or window >= self.max_length else window

    def in_chunks(self, size: int) -> "VarlenMetadata":
        """Documents cut into chunks of `size` tokens, each a document of its own, from the first
        token of each document on; cached.

        Raises:
            ValueError: the size is below 1, or a document has branches.
        """
        if size < 1:
            raise ValueError(f"a chunk of {size} tokens has none; it has at least 1")
        if size >= self.max_length:
            return self
        if self.start_rows is not None or self.run_ends is not None:
            raise ValueError(
                "documents with branches or bidirectional runs cannot be cut into chunks"
            )
        if ("chunks", size) not in self.memo:
            lengths = chunk_lengths(self.lengths, size)
            self.memo["chunks", size] = VarlenMetadata.of(lengths, self.cu_seqlens.device)
        return self.memo["chunks", size]

    def document_masks(
        self, first: int, length: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Start rows and run ends of a document, counted from its own first token."""
        start_rows, run_ends = (
            None if mask_T is None else mask_T[first : first + length] - first
            for mask_T in (self.start_rows, self.run_ends)
        )
        return start_rows, run_ends

    def causal(self) -> "VarlenMetadata":
        """The same documents without bidirectional runs."""
        # Another memo: flex's block masks in this one have the runs.
        return self if self.run_ends is None else replace(self, run_ends=None, memo={})

    @staticmethod
    def of(
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        start_rows: Sequence[int] | None = None,
        bidirectional: Sequence[tuple[int, int]] = (),
    ) -> "VarlenMetadata":
        """Documents of these lengths, one after another.

        The tokens of a bidirectional run (its first token, and its end) attend to one another in
        both directions, as those of an image do in Gemma 3. A window limits only what they see of
        the past.

        `start_rows` mask a document further, for completions that share a prompt: for each of the T
        tokens the number, counted over all of them, of the first one that does not attend to it.
        Numbers past its document's end mask it for none.

        Raises:
            ValueError: for no documents at all, or a document without tokens; for other start rows
                than one for each token, or a token that would be masked for itself; for runs that
                are not in order, or not within a document.
        """
        lengths = tuple(int(length) for length in lengths)
        if not lengths or min(lengths) < 1:
            raise ValueError(f"documents have at least one token each; the lengths are {lengths}")
        hides = start_rows is not None and _hides_anything(start_rows, lengths)
        groups = _groups(lengths)
        buckets = tuple(LengthBucket(len(g), max(lengths[i] for i in g)) for g in groups)
        return VarlenMetadata(
            lengths=lengths,
            num_tokens=sum(lengths),
            max_length=max(lengths),
            cu_seqlens=_to_device((0, *accumulate(lengths)), device),
            buckets=buckets,
            start_rows=_to_device(start_rows, device) if start_rows is not None and hides else None,
            run_ends=_to_device(_run_ends(bidirectional, lengths), device)
            if bidirectional
            else None,
        )


def chunk_lengths(lengths: Sequence[int], size: int) -> tuple[int, ...]:
    """The lengths of the chunks of at most `size` tokens of documents with these lengths."""
    return tuple(
        min(size, length - start) for length in lengths for start in range(0, length, size)
    )


def _to_device(numbers: Sequence[int], device: torch.device | str) -> torch.Tensor:
    return to_device(torch.tensor(numbers, dtype=torch.int32), device)


def _hides_anything(start_rows: Sequence[int], lengths: tuple[int, ...]) -> bool:
    """Whether a token is masked for a later one of its own document."""
    if len(start_rows) != sum(lengths):
        raise ValueError(f"there are {len(start_rows)} start rows for {sum(lengths)} tokens")
    for token, start in enumerate(start_rows):
        if start <= token:
            raise ValueError(
                f"token {token} would be hidden from token {start} on, and so from itself"
            )
    ends = (
        end for end, length in zip(accumulate(lengths), lengths, strict=True) for _ in range(length)
    )
    return any(start < end for start, end in zip(start_rows, ends, strict=True))


def _run_ends(runs: Sequence[tuple[int, int]], lengths: tuple[int, ...]) -> list[int]:
    """For each token the first later one that it does not see."""
    bounds = (0, *accumulate(lengths))
    ends = list(range(1, bounds[-1] + 1))
    last = 0
    for first, end in runs:
        within = bisect_right(bounds, first)
        if not last <= first < end <= bounds[-1] or end > bounds[within]:
            raise ValueError(
                f"a run of tokens {first} to {end} is not after the one before it, or not within"
                f" one of the documents of {lengths} tokens"
            )
        ends[first:end] = [end] * (end - first)
        last = end
    return ends


def _groups(lengths: tuple[int, ...]) -> list[list[int]]:
    """Document numbers by bucket, longest bucket first, each in document order."""
    groups: list[list[int]] = []
    width = 0
    for document in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[document]
        if not groups or width - length > max(TOLERATED_TOKENS, TOLERATED_SHARE * width):
            groups.append([])
            width = length
        groups[-1].append(document)
    return [sorted(group) for group in groups]


def _layout(
    groups: list[list[int]],
    buckets: tuple[LengthBucket, ...],
    lengths: tuple[int, ...],
    device: torch.device,
) -> Layout:
    # Made on the host, from the lengths: the device is not waited for.
    starts = (0, *accumulate(lengths))
    tokens, paddings = [], []
    for group, bucket in zip(groups, buckets, strict=True):
        start_B1 = torch.tensor([starts[document] for document in group]).unsqueeze(1)
        length_B1 = torch.tensor([lengths[document] for document in group]).unsqueeze(1)
        within_L = torch.arange(bucket.width)
        # A real token, not memory as it is: the zero gradients of padding times NaN would be NaN.
        tokens.append((start_B1 + torch.minimum(within_L, length_B1 - 1)).flatten())
        paddings.append((within_L >= length_B1).flatten())
    token_of_slot, is_padding = torch.cat(tokens), torch.cat(paddings)
    real_slots = (~is_padding).nonzero().squeeze(1)
    slot_of_token = torch.empty(starts[-1], dtype=torch.int64)
    slot_of_token[token_of_slot[real_slots]] = real_slots
    return Layout(*(to_device(x, device) for x in (token_of_slot, slot_of_token, is_padding)))
