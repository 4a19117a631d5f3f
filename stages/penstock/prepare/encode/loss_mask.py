"""Loss mask: label the tokens that overlap the trained character spans of a text.

For byte-level BPE, the number of bytes of each token is known, so a cumulative sum gives the span
of every token. If the sum differs from the length of the text (a normalizer changed it, or a
special token consumed blanks), and for other tokenizers, the character offsets of `tokenizers` are
used.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from penstock.prepare.bad_records import BadRecord
from penstock.prepare.encode.backends import TextEncoder
from penstock.prepare.encode.document import Document, Span
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

    def __call__(
        self, documents: Sequence[Document]
    ) -> tuple[TokenSequences, dict[int, BadRecord]]:
        """Encode and label documents; returns the reasons of those that cannot be labeled
        exactly."""
        ids, offsets = self.encoder.encode([document.text for document in documents])
        if all(document.spans is None for document in documents):
            return TokenSequences(ids, ids, offsets), {}
        is_weighted = any(document.weights for document in documents)
        if self._bytes is None:
            return self._replace_inexact(
                TokenSequences(ids, ids, offsets), documents, range(len(documents)), []
            )
        bytes_before = to_offsets(self._bytes.per_token[ids])
        sizes = np.array([self._bytes.count(document.text) for document in documents])
        is_odd = np.diff(bytes_before[offsets]) != sizes
        spans = [
            [] if odd else _byte_spans(document)
            for document, odd in zip(documents, is_odd.tolist(), strict=True)
        ]
        mask, is_astride = _mask_spans(bytes_before, offsets, spans)
        astride = [i for i in np.flatnonzero(is_astride).tolist() if documents[i].borders == "cut"]
        flat = TokenSequences(ids, _to_labels(ids, mask), offsets)
        if is_weighted:
            flat.weights = mask.astype(np.float32)
            for index, document in enumerate(documents):
                if document.weights and spans[index]:
                    own = slice(offsets[index], offsets[index + 1])
                    ends = bytes_before[own.start : own.stop + 1] - bytes_before[own.start]
                    weights = zip(spans[index], document.weights, strict=True)
                    flat.weights[own] = _weigh_tokens(ends[:-1], ends[1:], weights)
        return self._replace_inexact(flat, documents, np.flatnonzero(is_odd).tolist(), astride)

    def _replace_inexact(
        self,
        flat: TokenSequences,
        documents: Sequence[Document],
        odd: Sequence[int],
        astride: Sequence[int],
    ) -> tuple[TokenSequences, dict[int, BadRecord]]:
        patches: dict[int, LabeledTokens] = {
            index: self._encode_in_parts(documents[index]) for index in astride
        }
        faults: dict[int, BadRecord] = {}
        for index in odd:
            try:
                patches[index] = self._mask_by_characters(documents[index])
            except BadRecord as fault:
                faults[index] = fault
        return flat.replace(patches), faults

    def _encode_in_parts(self, document: Document) -> LabeledTokens:
        text, spans = document.text, _spans(document)
        borders = sorted({0, len(text), *(border for span in spans for border in span)})
        parts = list(pairwise(borders))
        ids, offsets = self.encoder.encode([text[start:end] for start, end in parts])
        weighted = [*zip(spans, _weights(document), strict=True)]
        of_parts = [sum(w for (a, b), w in weighted if a <= start < b) for start, _ in parts]
        weights = np.repeat(np.array(of_parts, dtype=np.float32), np.diff(offsets))
        return LabeledTokens(
            ids, _to_labels(ids, weights > 0), weights if document.weights else None
        )

    def _mask_by_characters(self, document: Document) -> LabeledTokens:
        ids, starts, ends = self.encoder.encode_with_offsets(document.text)
        spans = _spans(document)
        weights = _weigh_tokens(starts, ends, zip(spans, _weights(document), strict=True))
        for span in spans:
            for border in span:
                if document.borders == "cut" and ((starts < border) & (border < ends)).any():
                    raise BadRecord(
                        "template",
                        f"a token lies astride the border of a turn, at character {border + 1}, so "
                        "a prompt would not have the tokens that it has here",
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


def byte_lengths(tokenizer: PreTrainedTokenizerBase, its: dict[str, Any]) -> ByteLengths | None:
    """Byte counts of all tokens; None if the tokenizer (tokenizer.json `its`) is not byte-level
    BPE.

    In a byte-level BPE vocabulary each character represents one byte; added tokens are literal.
    """
    normalizers = {step["type"] for step in _flatten(its["normalizer"])}
    levels = [step for step in _flatten(its["pre_tokenizer"]) if step["type"] == "ByteLevel"]
    if its["model"]["type"] != "BPE" or not levels or normalizers - {"NFC"}:
        return None
    if any(step["add_prefix_space"] for step in levels):
        return None
    vocabulary = tokenizer.get_vocab()
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
    return [leaf for each in inner for leaf in _flatten(each)]


def _to_labels(ids: Ids, mask: Mask) -> Ids:
    return np.where(mask, ids, np.int32(IGNORED))


def _spans(document: Document) -> Sequence[Span]:
    return [(0, len(document.text))] if document.spans is None else document.spans


def _weights(document: Document) -> Sequence[float]:
    return document.weights or [1.0] * len(_spans(document))


def _weigh_tokens(starts: Offsets, ends: Offsets, spans: Iterable[tuple[Span, float]]) -> Weights:
    """Loss weight of each token that overlaps a span, given where tokens start and end; 0 for the
    others. A token across the border of two spans has the weight of the second."""
    weights = np.zeros(len(starts), dtype=np.float32)
    for (start, end), weight in spans:
        if start < end:
            first = np.searchsorted(ends, start, side="right")
            weights[first : np.searchsorted(starts, end, side="left")] = weight
    return weights


def _byte_spans(document: Document) -> Sequence[Span]:
    text, spans = document.text, _spans(document)
    if text.isascii():
        return spans
    found: list[int] = []
    place = size = 0
    for border in (border for span in spans for border in span):
        size += len(text[place:border].encode())
        place = border
        found.append(size)
    return list(zip(found[::2], found[1::2], strict=True))


def _mask_spans(
    bytes_before: Offsets, offsets: Offsets, spans: Sequence[Sequence[Span]]
) -> tuple[Mask, Mask]:
    """(mask of tokens that overlap a span, mask of documents with a token across a span border).

    Token `t` has bytes `bytes_before[t]` to `bytes_before[t + 1]`; spans are relative to the first
    byte of their document.
    """
    of = np.repeat(np.arange(len(spans)), [len(each) for each in spans])
    borders = np.array([span for each in spans for span in each], dtype=np.int64).reshape(-1, 2)
    borders += bytes_before[offsets[of]][:, None]
    filled = borders[borders[:, 0] < borders[:, 1]]
    steps = np.zeros(len(bytes_before), dtype=np.int64)
    np.add.at(steps, np.searchsorted(bytes_before[1:], filled[:, 0], side="right"), 1)
    np.add.at(steps, np.searchsorted(bytes_before[:-1], filled[:, 1], side="left"), -1)
    is_astride = np.zeros(len(spans), dtype=np.bool_)
    places = np.searchsorted(bytes_before, borders)
    is_astride[of[(bytes_before[places] != borders).any(axis=1)]] = True
    return np.cumsum(steps[:-1]) > 0, is_astride
