"""Text to token ids, by the fastest library that gives the tokenizer's own.

`fastokens` (an optional package) encodes about ten times as fast as `tokenizers`. It is taken only
where its ids are the same: for a few hard texts when it is loaded, and for some texts of every
batch. Which library encodes is never part of what the data is.
"""

import json
import logging
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, pairwise
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from penstock.core.errors import CapabilityError
from penstock.prepare.encode.ragged import Ids, Offsets, to_offsets

log = logging.getLogger("penstock.prepare")

FASTOKENS_ERRORS = (ValueError, RuntimeError, TypeError)
"""What the fast library raises for a tokenizer or a text that it cannot take."""

FIRST_BATCH_CHECKS = 16
"""Texts of a slice's first batch that the tokenizer encodes too, for comparison."""

LATER_BATCH_CHECKS = 1
"""Texts of every other batch, of about a megabyte. Those beyond ASCII go first, in both."""

CHECK_CHARACTERS = 2000
"""Of a long text the beginning is compared; cut off within a word, it is a text too."""

HARD_TEXTS = (
    "",
    " ",
    "word",
    "I'll say it's  two   spaces\tand tabs\t\t \n\n lines\r\n \r end  ",
    "1234567 3.14 x=10**-9; snake_case CamelCase HTTPServer don't DON'T 'S",
    "naïve café Ångström Å Å ﬁ ½ ² ﷺ क़",
    "日本語のテキスト、中文字符。한국어 텍스트 עברית العربية ไทย",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\u00a0\u3000\u2028\ufeff\x00\x7f\u0085",
    "<|a|> <s></s> [INST] {{x}} <think>\n</think>\n\n\n#### 42",
    "a" * 300 + " " * 40 + "\n" * 9 + "!?.,;:" * 9 + "é" * 40,
)
"""Where tokenizers are known to differ: contractions, runs of blanks, digits, marks, joiners."""


class BackendMismatch(Exception):  # noqa: N818 - a fact about two libraries; it never leaves prepare
    """The fast library gives other ids than the tokenizer."""


class Backend(Protocol):
    """Encodes without special tokens of its own accord; those in the text are read as such."""

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """All ids, and where those of each text begin and end."""
        ...


class _Fastokens:
    """The package `fastokens`."""

    def __init__(self, tokenizer_json: str, *, splits_special: bool) -> None:
        self._tokenizer = import_module("fastokens").Tokenizer.from_json_str(tokenizer_json)
        self._splits_special = splits_special

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        ids, offsets = self._tokenizer.encode_batch_flat(
            list(texts), split_special_tokens=self._splits_special
        )
        return np.frombuffer(ids, np.uint32).view(np.int32), np.frombuffer(offsets, np.int64)


class _HFTokenizers:
    """The package `tokenizers`, which transformers' fast tokenizers are made of."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        found = [e.ids for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        offsets = to_offsets([len(ids) for ids in found])
        return np.fromiter(chain.from_iterable(found), np.int32, offsets[-1]), offsets


class TextEncoder:
    """Token ids of texts, and the characters that each token stands for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises CapabilityError for a tokenizer that does more than its library does."""
        self._tokenizer = tokenizer
        its_json, self.definition = tokenizer_definition(tokenizer)
        self._splits_special: bool = bool(getattr(tokenizer, "split_special_tokens", False))
        self._tokenizers_library = Tokenizer.from_str(its_json)
        self._tokenizers_library.encode_special_tokens = self._splits_special
        self._backend: Backend = _HFTokenizers(self._tokenizers_library)
        self.fallback_reason = ""
        """Why the fast library is not used; empty where it is."""
        hard = [*HARD_TEXTS, *_special_token_texts(tokenizer)]
        if self._find_mismatches(hard):
            raise CapabilityError(
                f"The tokenizer {type(tokenizer).__name__} changes texts in code of its own, which "
                "preparing does not run.\n"
                "  Use data of type tokenized, or a tokenizer that is all in its tokenizer.json."
            )
        self._try_fastokens(its_json, hard)

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """All ids, and where those of each text begin and end. Raises Disagreement, as `check`."""
        try:
            return self._backend.encode(texts)
        except FASTOKENS_ERRORS as error:
            if self.fallback_reason:
                raise
            self._fall_back(f"it cannot take a text ({error})")
            raise BackendMismatch from error

    def check(self, texts: Sequence[str], how_many: int) -> None:
        """Compare the fast library with the tokenizer on some of these texts.

        Raises Disagreement when it is not exact; from then on it is not used. Whoever has used
        what it gave before encodes that again.
        """
        if self.fallback_reason:
            return
        by_difficulty = sorted(texts, key=str.isascii)
        sample = [text[:CHECK_CHARACTERS] for text in by_difficulty[:how_many]]
        if sample and (differing := self._find_mismatches(sample)):
            self._fall_back(f"it differs from tokenizers on {differing[0]!r:.60}")
            raise BackendMismatch

    def encode_with_offsets(self, text: str) -> tuple[Ids, Offsets, Offsets]:
        """Ids, and the first and the last character but one of each, which cover the text.

        Slow, for texts whose tokens are not simply their bytes.
        """
        encoded = self._tokenizers_library.encode(text, add_special_tokens=False)
        places = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)
        # Libraries may trim blanks off a token's place; they belong to it all the same.
        starts, ends = places[:, 0], places[:, 1]
        starts[1:] = np.minimum(ends[:-1], starts[1:])
        starts[:1], ends[-1:] = 0, len(text)
        return np.array(encoded.ids, dtype=np.int32), starts, ends

    def _try_fastokens(self, its_json: str, hard: list[str]) -> None:
        if find_spec("fastokens") is None:
            return self._fall_back("it is not installed (pip install 'penstock[fast]')")
        try:
            self._backend = _Fastokens(its_json, splits_special=self._splits_special)
            differing = self._find_mismatches(hard)
        except FASTOKENS_ERRORS as error:
            return self._fall_back(f"it cannot take this tokenizer ({error})")
        if differing:
            return self._fall_back(f"it differs from tokenizers on {differing[0]!r:.60}")
        return None

    def _fall_back(self, why: str) -> None:
        self._backend = _HFTokenizers(self._tokenizers_library)
        self.fallback_reason = f"Encoding with tokenizers, not fastokens: {why}."
        log.warning(self.fallback_reason)

    def _find_mismatches(self, texts: list[str]) -> list[str]:
        """The texts that the chosen library encodes unlike transformers."""
        judge: Any = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        ids, offsets = self._backend.encode(texts)
        found = [ids[a:b].tolist() for a, b in pairwise(offsets)]
        return [
            text
            for text, mine, its in zip(texts, found, judge["input_ids"], strict=True)
            if mine != its
        ]


def special_token_affixes(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before a text and after it."""
    text = "a"
    inner = _ids(tokenizer, text, special=False)
    outer = _ids(tokenizer, text, special=True)
    start = next(i for i in range(len(outer)) if outer[i : i + len(inner)] == inner)
    return outer[:start], outer[start + len(inner) :]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    encoded: Any = tokenizer(text, add_special_tokens=special, verbose=False)
    return encoded["input_ids"]


def _special_token_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    return [f"a {token} b\n{token}{token}é" for token in added[:64]]


def tokenizer_definition(tokenizer: PreTrainedTokenizerBase) -> tuple[str, dict[str, Any]]:
    """What the library knows the tokenizer by, as text and as an object.

    That texts are to be cut or filled is left out, for transformers does neither unless asked.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    its_json = backend.to_str()
    its = json.loads(its_json)
    if its["truncation"] or its["padding"]:
        its = {**its, "truncation": None, "padding": None}
        its_json = json.dumps(its, ensure_ascii=False)
    return its_json, its
