"""Loss mask: label the tokens that overlap the trained character spans of a text.

A text is encoded once, as a whole, so that no special token is cut and the tokens are those that
transformers makes of it.

For byte-level BPE, the number of bytes of each token is known, so a cumulative sum gives the span
of every token. If the sum differs from the length of the text (a normalizer changed it, or a
special token consumed blanks), and for other tokenizers, the character offsets of `tokenizers` are
used.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from penstock.prepare.encode.backends import TextEncoder
from penstock.prepare.encode.document import Document
from penstock.prepare.encode.ragged import (
    Ids,
    LabeledTokens,
    Mask,
    Offsets,
    TokenSequences,
    Weights,
    to_offsets,
)
from penstock.rows.schema import IGNORED


class LossMasker:
    """Encodes documents and labels their trained tokens, vectorized for byte-level BPE."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises CapabilityError as `TextEncoder`."""
        self.encoder = TextEncoder(tokenizer)
        self._bytes = byte_lengths(tokenizer, self.encoder.definition)

    def __call__(self, documents: Sequence[Document]) -> TokenSequences:
        """Encode and label documents."""
        ids, offsets = self.encoder.encode([document.text for document in documents])
        flat = TokenSequences(ids, ids, offsets)
        if all(document.spans is None for document in documents):
            return flat
        is_weighted = any(document.weights for document in documents)
        if self._bytes is None:
            return self._replace_by_characters(flat, documents, range(len(documents)))
        bytes_before = to_offsets(self._bytes.per_token[ids])
        sizes = np.array([self._bytes.count(document.text) for document in documents])
        is_odd = np.diff(bytes_before[offsets]) != sizes
        spans = [
            [] if odd else _byte_spans(document)
            for document, odd in zip(documents, is_odd.tolist(), strict=True)
        ]
        mask = _mask_spans(bytes_before, offsets, spans)
        flat = TokenSequences(ids, _to_labels(ids, mask), offsets)
        if is_weighted:
            flat.weights = mask.astype(np.float32)
            for index, document in enumerate(documents):
                if document.weights and spans[index]:
                    own = slice(offsets[index], offsets[index + 1])
                    ends = bytes_before[own.start : own.stop + 1] - bytes_before[own.start]
                    weights = zip(spans[index], document.weights, strict=True)
                    flat.weights[own] = _weigh_tokens(ends[:-1], ends[1:], weights)
        return self._replace_by_characters(flat, documents, np.flatnonzero(is_odd).tolist())

    def _replace_by_characters(
        self, flat: TokenSequences, documents: Sequence[Document], odd: Sequence[int]
    ) -> TokenSequences:
        return flat.replace({index: self._mask_by_characters(documents[index]) for index in odd})

    def _mask_by_characters(self, document: Document) -> LabeledTokens:
        ids, starts, ends = self.encoder.encode_with_offsets(document.text)
        spans = _spans(document)
        weights = _weigh_tokens(
            starts, ends, zip(spans, document.weights or [1.0] * len(spans), strict=True)
        )
        return LabeledTokens(
            ids, _to_labels(ids, weights > 0), weights if document.weights else None
        )


@lru_cache(maxsize=4)
def get_loss_masker(tokenizer: PreTrainedTokenizerBase) -> LossMasker:
    """Cached per process, so that the fastokens check applies to all slices."""
    return LossMasker(tokenizer)


@dataclass(frozen=True, eq=False)
class ByteLengths:
    """Byte counts of the tokens of a byte-level tokenizer."""

    per_token: Offsets
    """Bytes of each token, by token id."""

    normalizes_nfc: bool
    """Whether texts are normalized to Unicode NFC first."""

    def count(self, text: str) -> int:
        """Number of bytes of a text; -1 if the normalizer changes it, which matches no sum."""
        if text.isascii():
            return len(text)
        if self.normalizes_nfc and not unicodedata.is_normalized("NFC", text):
            return -1
        return len(text.encode())


def byte_lengths(
    tokenizer: PreTrainedTokenizerBase, definition: dict[str, Any]
) -> ByteLengths | None:
    """Byte counts of all tokens; None if the tokenizer (tokenizer.json `definition`) is not
    byte-level BPE.

    In a byte-level BPE vocabulary each character represents one byte; added tokens are literal.
    """
    normalizers = {step["type"] for step in _flatten(definition["normalizer"])}
    levels = [step for step in _flatten(definition["pre_tokenizer"]) if step["type"] == "ByteLevel"]
    # NFC can be tested per text (`count`); others may move bytes and leave their sum as it was.
    if definition["model"]["type"] != "BPE" or not levels or normalizers - {"NFC"}:
        return None
    # The space that such a pre-tokenizer adds is a byte of a token and not of the text.
    if any(step["add_prefix_space"] for step in levels):
        return None
    vocabulary = tokenizer.get_vocab()
    # Not len(vocabulary): the ids of some tokenizers have gaps.
    lengths = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
    lengths[list(vocabulary.values())] = [len(token) for token in vocabulary]
    for index, token in tokenizer.added_tokens_decoder.items():
        lengths[index] = len(token.content.encode())
    return ByteLengths(lengths, normalizes_nfc=bool(normalizers))


def _flatten(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    inner = step.get("pretokenizers", step.get("normalizers", []))
    return [leaf for child in inner for leaf in _flatten(child)]


def _to_labels(ids: Ids, mask: Mask) -> Ids:
    return np.where(mask, ids, np.int32(IGNORED))


def _spans(document: Document) -> Sequence[tuple[int, int]]:
    if document.spans is None:
        return [(0, len(document.text))]
    return [(span.start, span.stop) for span in document.spans]


def _weigh_tokens(
    starts: Offsets, ends: Offsets, spans: Iterable[tuple[tuple[int, int], float]]
) -> Weights:
    """Loss weight of each token that overlaps a span, given where tokens start and end; 0 for the
    others. A token across the border of two spans has the weight of the second."""
    weights = np.zeros(len(starts), dtype=np.float32)
    for (start, end), weight in spans:
        if start < end:
            # A token that ends where the span starts, or starts where it ends, does not overlap it.
            first = np.searchsorted(ends, start, side="right")
            weights[first : np.searchsorted(starts, end, side="left")] = weight
    return weights


def _byte_spans(document: Document) -> Sequence[tuple[int, int]]:
    text, spans = document.text, _spans(document)
    if text.isascii():
        return spans
    byte_spans: list[int] = []
    offset = size = 0
    for border in (border for span in spans for border in span):
        size += len(text[offset:border].encode())
        offset = border
        byte_spans.append(size)
    return list(zip(byte_spans[::2], byte_spans[1::2], strict=True))


def _mask_spans(
    bytes_before: Offsets, offsets: Offsets, spans: Sequence[Sequence[tuple[int, int]]]
) -> Mask:
    """Mask of the tokens that overlap a span.

    Token `t` has bytes `bytes_before[t]` to `bytes_before[t + 1]`; spans are relative to the first
    byte of their document.
    """
    of = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
    borders = np.array(
        [span for sample_spans in spans for span in sample_spans], dtype=np.int64
    ).reshape(-1, 2)
    borders += bytes_before[offsets[of]][:, None]
    filled = borders[borders[:, 0] < borders[:, 1]]
    edges = np.empty_like(filled)
    edges[:, 0] = np.searchsorted(bytes_before[1:], filled[:, 0], side="right")
    edges[:, 1] = np.searchsorted(bytes_before[:-1], filled[:, 1], side="left")
    # A token across the border of two spans is an end after a start.
    ordered = np.maximum.accumulate(edges.ravel())
    # Runs of tokens take turns, the first one untrained, so those with an odd index are trained.
    lengths = np.diff(ordered, prepend=0, append=len(bytes_before) - 1)
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
