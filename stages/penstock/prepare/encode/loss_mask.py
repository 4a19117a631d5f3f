"""Which tokens overlap the trained characters of a text.

A tokenizer of bytes needs no help for it: the bytes that each token of its vocabulary stands for
are known, so their running sum says where every token begins and ends. That holds while the sum is
the length of the text; where it is not (a normalizer changed the text, a special token swallowed
blanks), and for tokenizers of other kinds, the library is asked for the characters of each token.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from penstock.prepare.bad_records import BadRow
from penstock.prepare.encode.backends import TextEncoder
from penstock.prepare.encode.document import Document, Span
from penstock.prepare.encode.ragged import Flat, Ids, Labelled, Mask, Places, sequence_ends
from penstock.rows.schema import IGNORED


class Marker:
    """Encodes documents and labels their trained tokens, all at once where bytes tell."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises CapabilityError for a tokenizer that does more than its library does."""
        self.encoder = TextEncoder(tokenizer)
        self._bytes = byte_lengths(tokenizer, self.encoder.definition)

    def __call__(self, documents: Sequence[Document]) -> tuple[Flat, dict[int, BadRow]]:
        """Every document encoded, and the faults of those that cannot be marked exactly."""
        ids, offsets = self.encoder.encode([document.text for document in documents])
        if all(document.spans is None for document in documents):
            return Flat(ids, ids, offsets), {}
        if self._bytes is None:
            return self._patched(Flat(ids, ids, offsets), documents, range(len(documents)), [])
        bytes_before = sequence_ends(self._bytes.of_token[ids])
        sizes = np.array([self._bytes.in_text(document.text) for document in documents])
        is_odd = np.diff(bytes_before[offsets]) != sizes
        spans = [
            [] if odd else _in_bytes(document)
            for document, odd in zip(documents, is_odd.tolist(), strict=True)
        ]
        mask, is_astride = _marked(bytes_before, offsets, spans)
        astride = [i for i in np.flatnonzero(is_astride).tolist() if documents[i].borders == "cut"]
        flat = Flat(ids, _labels(ids, mask), offsets)
        return self._patched(flat, documents, np.flatnonzero(is_odd).tolist(), astride)

    def _patched(
        self, flat: Flat, documents: Sequence[Document], odd: Sequence[int], astride: Sequence[int]
    ) -> tuple[Flat, dict[int, BadRow]]:
        patches: dict[int, Labelled] = {
            index: self._in_parts(documents[index]) for index in astride
        }
        faults: dict[int, BadRow] = {}
        for index in odd:
            try:
                patches[index] = self._by_characters(documents[index])
            except BadRow as fault:
                faults[index] = fault
        return flat.replaced(patches), faults

    def _in_parts(self, document: Document) -> Labelled:
        text, spans = document.text, _spans(document)
        borders = sorted({0, len(text), *(border for span in spans for border in span)})
        parts = list(pairwise(borders))
        ids, offsets = self.encoder.encode([text[start:end] for start, end in parts])
        trained = [any(a <= start < b for a, b in spans) for start, _ in parts]
        return ids, _labels(ids, np.repeat(np.array(trained, dtype=np.bool_), np.diff(offsets)))

    def _by_characters(self, document: Document) -> Labelled:
        ids, starts, ends = self.encoder.located(document.text)
        mask = np.zeros(len(ids), dtype=np.bool_)
        for start, end in _spans(document):
            first = np.searchsorted(ends, start, side="right")
            mask[first : np.searchsorted(starts, end, side="left")] |= start < end
            for border in (start, end):
                if document.borders == "cut" and ((starts < border) & (border < ends)).any():
                    raise BadRow(
                        "template",
                        f"a token lies astride the border of a turn, at character {border + 1}, so "
                        "a prompt would not have the tokens that it has here",
                    )
        return ids, _labels(ids, mask)


@lru_cache(maxsize=4)
def marker(tokenizer: PreTrainedTokenizerBase) -> Marker:
    """The one of this process: what it has learnt of its libraries holds for all slices."""
    return Marker(tokenizer)


@dataclass(frozen=True, eq=False)
class Bytes:
    """Of a tokenizer whose tokens are runs of bytes."""

    of_token: Places
    """How many bytes of text a token stands for, by its id."""

    composes: bool
    """Whether texts are brought into Unicode's form NFC first."""

    def in_text(self, text: str) -> int:
        """Bytes of a text; -1, which no sum of tokens is, where it is encoded as another."""
        if text.isascii():
            return len(text)
        if self.composes and not unicodedata.is_normalized("NFC", text):
            return -1
        return len(text.encode())


def byte_lengths(tokenizer: PreTrainedTokenizerBase, its: dict[str, Any]) -> Bytes | None:
    """The bytes of every token; None if the tokenizer, defined by `its`, is not one of bytes.

    In the vocabulary of byte-level BPE each character stands for one byte; added tokens stand for
    themselves.
    """
    normalizers = {step["type"] for step in _flattened(its["normalizer"])}
    levels = [step for step in _flattened(its["pre_tokenizer"]) if step["type"] == "ByteLevel"]
    if its["model"]["type"] != "BPE" or not levels or normalizers - {"NFC"}:
        return None
    if any(step["add_prefix_space"] for step in levels):
        return None
    vocabulary = tokenizer.get_vocab()
    lengths = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
    lengths[list(vocabulary.values())] = [len(token) for token in vocabulary]
    for index, token in tokenizer.added_tokens_decoder.items():
        lengths[index] = len(token.content.encode())
    return Bytes(lengths, composes=bool(normalizers))


def _flattened(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    inner = step.get("pretokenizers", step.get("normalizers", []))
    return [leaf for each in inner for leaf in _flattened(each)]


def _labels(ids: Ids, mask: Mask) -> Ids:
    return np.where(mask, ids, np.int32(IGNORED))


def _spans(document: Document) -> Sequence[Span]:
    return [(0, len(document.text))] if document.spans is None else document.spans


def _in_bytes(document: Document) -> Sequence[Span]:
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


def _marked(
    bytes_before: Places, offsets: Places, spans: Sequence[Sequence[Span]]
) -> tuple[Mask, Mask]:
    """The tokens that overlap a span, and the documents where a token lies astride its border.

    Token `t` of all is bytes `bytes_before[t]` to `bytes_before[t + 1]`; the spans of a document
    count from its own first byte.
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
