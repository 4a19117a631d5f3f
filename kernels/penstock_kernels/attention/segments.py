"""Which tokens of a flat micro-batch belong to which document, and their layout for attention.

Documents of similar length form a bucket: each is padded on the right to the bucket's longest, and
attention runs once per bucket. Padding on the right needs no mask, because causal attention never
looks to the right; what padded positions compute is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

TOLERATED_SHARE = 0.2
"""A document joins a bucket if at most this share of the bucket's width would be padding ..."""
TOLERATED_TOKENS = 16
"""... or at most this many tokens: for short documents a call costs more than the padding."""


@dataclass(frozen=True)
class Bucket:
    """Documents that attend in one call, as rows of `width` tokens."""

    num_documents: int
    width: int

    @property
    def num_slots(self) -> int:
        """Tokens in the bucket's rows, padding included."""
        return self.num_documents * self.width


@dataclass(frozen=True, eq=False)
class Layout:
    """The buckets' rows as one list of slots, where that differs from the tokens in order."""

    token_of_slot: torch.Tensor
    """int64 [S]: the token in each slot; a padding slot names its document's last token."""
    slot_of_token: torch.Tensor
    """int64 [T]: the slot of each token."""
    is_padding: torch.Tensor
    """bool [S]."""


@dataclass(frozen=True, eq=False)
class Segments:
    """The documents of one micro-batch. Built once, used by every layer."""

    lengths: tuple[int, ...]
    """Tokens of each document, in order."""
    max_length: int
    cu_seqlens: torch.Tensor
    """int32 [documents + 1] on the device: where each document begins, and the end of the last."""
    buckets: tuple[Bucket, ...]
    """Longest first."""
    layout: Layout | None
    """None where the documents are one bucket as they lie: nothing needs to be copied."""

    @property
    def num_tokens(self) -> int:
        """T, tokens in the micro-batch."""
        return sum(self.lengths)

    def narrowed(self, window: int | None) -> int | None:
        """The window, if it hides something of some document; else None."""
        return None if window is None or window >= self.max_length else window

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device | str = "cpu") -> "Segments":
        """The documents whose lengths are these, one after another.

        Raises:
            ValueError: for no documents at all, or a document without tokens.
        """
        lengths = tuple(int(length) for length in lengths)
        if not lengths or min(lengths) < 1:
            raise ValueError(f"documents have at least one token each; the lengths are {lengths}")
        groups = _groups(lengths)
        buckets = tuple(Bucket(len(g), max(lengths[i] for i in g)) for g in groups)
        return Segments(
            lengths=lengths,
            max_length=max(lengths),
            cu_seqlens=torch.tensor((0, *accumulate(lengths)), dtype=torch.int32, device=device),
            buckets=buckets,
            layout=None if len(set(lengths)) == 1 else _layout(groups, buckets, lengths, device),
        )


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
    buckets: tuple[Bucket, ...],
    lengths: tuple[int, ...],
    device: torch.device | str,
) -> Layout:
    starts = (0, *accumulate(lengths))
    tokens, paddings = [], []
    for group, bucket in zip(groups, buckets, strict=True):
        start_B1 = torch.tensor([starts[document] for document in group]).unsqueeze(1)
        length_B1 = torch.tensor([lengths[document] for document in group]).unsqueeze(1)
        within_L = torch.arange(bucket.width)
        tokens.append((start_B1 + torch.minimum(within_L, length_B1 - 1)).flatten())
        paddings.append((within_L >= length_B1).flatten())
    token_of_slot, is_padding = torch.cat(tokens), torch.cat(paddings)
    real_slots = (~is_padding).nonzero().squeeze(1)
    slot_of_token = torch.empty(starts[-1], dtype=torch.int64)
    slot_of_token[token_of_slot[real_slots]] = real_slots
    return Layout(token_of_slot.to(device), slot_of_token.to(device), is_padding.to(device))
