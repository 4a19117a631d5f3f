"""Tokenization backends: fastokens if it gives the same token ids, else tokenizers.

`fastokens` (an optional package) is about ten times as fast as `tokenizers`. Its token ids are
compared with the tokenizer's on difficult texts when it is loaded and on some texts of every batch.
The backend is not part of the cache key.
"""

import json
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, pairwise
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from penstock.core.errors import CapabilityError, PenstockError, StageError
from penstock.prepare.encode.ragged import Ids, Offsets, to_offsets

log = logging.getLogger("penstock.prepare")

FASTOKENS_ERRORS = (ValueError, RuntimeError, TypeError)
"""Errors that fastokens raises for tokenizers or texts that it does not support."""

FIRST_BATCH_CHECKS = 16
"""Number of texts of the first batch that are compared."""

LATER_BATCH_CHECKS = 1
"""Number of texts of later batches (of about 1 MB) that are compared, non-ASCII texts first."""

CHECK_CHARACTERS = 2000
"""Maximum characters that are compared per text."""

# Texts on which tokenizers differ: contractions, runs of blanks, digits, combining marks, joiners.
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


class BackendMismatch(Exception):  # noqa: N818 - caught in tokenize_slice
    """fastokens gave other token ids than the tokenizer."""


class Backend(Protocol):
    """Encodes texts without adding special tokens; special tokens in the text are recognized."""

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """(token ids of all texts, offsets of each text)."""
        ...


class _Fastokens:
    def __init__(self, tokenizer_json: str, *, splits_special: bool) -> None:
        self._tokenizer = import_module("fastokens").Tokenizer.from_json_str(tokenizer_json)
        self._splits_special = splits_special

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        ids, offsets = self._tokenizer.encode_batch_flat(
            list(texts), split_special_tokens=self._splits_special
        )
        # A view, which copies nothing: ids are below 2**31.
        return np.frombuffer(ids, np.uint32).view(np.int32), np.frombuffer(offsets, np.int64)


class _HFTokenizers:
    """The package `tokenizers`, the backend of transformers' fast tokenizers."""

    def __init__(self, tokenizer: Tokenizer, name: str = "") -> None:
        self._tokenizer = tokenizer
        self._name = name

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        with _tokenizer_errors(self._name):
            # encode_batch would also keep track of offsets, which nothing here reads.
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        token_ids = [encoding.ids for encoding in encodings]
        offsets = to_offsets([len(ids) for ids in token_ids])
        return np.fromiter(chain.from_iterable(token_ids), np.int32, offsets[-1]), offsets


class TextEncoder:
    """Encodes texts to token ids, and maps tokens to characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises CapabilityError for a tokenizer whose Python class changes texts."""
        self._tokenizer = tokenizer
        self._name: str = tokenizer.name_or_path or type(tokenizer).__name__
        its_json, self.definition = tokenizer_definition(tokenizer)
        self._splits_special: bool = bool(getattr(tokenizer, "split_special_tokens", False))
        self._tokenizers_library = Tokenizer.from_str(its_json)
        # Not part of tokenizer.json: transformers 5.23 sets it on its own copy for each call.
        self._tokenizers_library.encode_special_tokens = self._splits_special
        self._added = np.array(sorted(tokenizer.added_tokens_decoder), dtype=np.int32)
        # In the text, as steps may be nested in Sequences.
        self._trims_offsets = '"ByteLevel"' in json.dumps(
            [self.definition["pre_tokenizer"], self.definition["post_processor"]]
        )
        self._backend: Backend = _HFTokenizers(self._tokenizers_library, self._name)
        self.fallback_reason = ""
        """Why fastokens is not used; empty if it is."""
        hard = [*HARD_TEXTS, *_special_token_texts(tokenizer)]
        if self._find_mismatches(hard):
            raise CapabilityError(
                f"The tokenizer {self._name} ({type(tokenizer).__name__}) gives other ids than its "
                "tokenizer.json: its Python code changes texts, which the prepare stage does not "
                "run, or its vocabulary is damaged.\n"
                "  Use data of type tokenized, or a tokenizer defined by its tokenizer.json alone."
            )
        self._try_fastokens(its_json, hard)

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """(token ids of all texts, offsets of each text). Raises BackendMismatch as `check`."""
        try:
            return self._backend.encode(texts)
        except FASTOKENS_ERRORS as error:
            # Of the package tokenizers, then: there is nothing to fall back to.
            if self.fallback_reason:
                raise
            self._fall_back(f"it does not support a text ({error})")
            raise BackendMismatch from error

    def check(self, texts: Sequence[str], how_many: int) -> None:
        """Compare fastokens with the tokenizer on some of these texts.

        Raises BackendMismatch if they differ; fastokens is then no longer used, and the caller must
        encode earlier texts again.
        """
        if self.fallback_reason:
            return
        # False comes first: texts with other characters, on which tokenizers differ most.
        by_difficulty = sorted(texts, key=str.isascii)
        sample = [text[:CHECK_CHARACTERS] for text in by_difficulty[:how_many]]
        if sample and (differing := self._find_mismatches(sample)):
            self._fall_back(f"it differs from tokenizers on {differing[0]!r:.60}")
            raise BackendMismatch

    def encode_with_offsets(self, text: str) -> tuple[Ids, Offsets, Offsets]:
        """(token ids, first character of each, character after the last of each).

        Slow; used for texts whose tokens cannot be located by byte counts.
        """
        encoded = self._tokenizers_library.encode(text, add_special_tokens=False)
        ids = np.array(encoded.ids, dtype=np.int32)
        offsets = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)
        starts, ends = offsets[:, 0], offsets[:, 1]
        if self._trims_offsets:
            # Offsets exclude leading blanks of a token; extend them to the previous token.
            before = np.minimum(ends[:-1], starts[1:])
            starts[1:] = np.where(np.isin(ids[1:], self._added), starts[1:], before)
            # Blanks left out at the ends of the text belong to its first and last token.
            starts[:1], ends[-1:] = 0, len(text)
        return ids, starts, ends

    def _try_fastokens(self, its_json: str, hard: list[str]) -> None:
        if find_spec("fastokens") is None:
            self.fallback_reason = "Encoding with tokenizers: fastokens is not installed."
            return None
        try:
            self._backend = _Fastokens(its_json, splits_special=self._splits_special)
            differing = self._find_mismatches(hard)
        except FASTOKENS_ERRORS as error:
            return self._fall_back(f"it does not support this tokenizer ({error})")
        if differing:
            return self._fall_back(f"it differs from tokenizers on {differing[0]!r:.60}")
        return None

    def _fall_back(self, why: str) -> None:
        self._backend = _HFTokenizers(self._tokenizers_library, self._name)
        self.fallback_reason = f"Encoding with tokenizers, not fastokens: {why}."
        log.warning(self.fallback_reason)

    def _find_mismatches(self, texts: list[str]) -> list[str]:
        """The texts for which the backend's token ids differ from those of transformers."""
        with _tokenizer_errors(self._name):
            # verbose=False: transformers warns of texts longer than the model's model_max_length.
            judge: Any = self._tokenizer(
                texts, add_special_tokens=False, return_attention_mask=False, verbose=False
            )
        ids, offsets = self._backend.encode(texts)
        encoded = [ids[a:b].tolist() for a, b in pairwise(offsets)]
        return [
            text
            for text, ids, judge_ids in zip(texts, encoded, judge["input_ids"], strict=True)
            if ids != judge_ids
        ]


@contextmanager
def _tokenizer_errors(name: str) -> Generator[None]:
    """Raise StageError for what the package tokenizers raises, also for a panic in Rust, which is
    no Exception."""
    try:
        yield
    except (PenstockError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise StageError(
            f"The tokenizer {name} cannot encode a text: {str(error).partition(chr(10))[0]}\n"
            "  Correct its tokenizer.json, or set model.tokenizer_path to another one."
        ) from error


def special_token_affixes(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer adds before and after a text."""
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
    # Not all: Llama 3 has 256 added tokens, most of them reserved.
    return [f"a {token} b\n{token}{token}é" for token in added[:64]]


def tokenizer_definition(tokenizer: PreTrainedTokenizerBase) -> tuple[str, dict[str, Any]]:
    """The tokenizer's tokenizer.json, as text and parsed, without truncation and padding, which
    transformers does not apply by default.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    its_json = backend.to_str()
    definition = json.loads(its_json)
    if definition["truncation"] or definition["padding"]:
        definition = {**definition, "truncation": None, "padding": None}
        its_json = json.dumps(definition, ensure_ascii=False)
    return its_json, definition
