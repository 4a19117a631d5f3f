"""Decode token ids for display: special tokens are kept, and unknown ids are shown.

Uses only the `tokenizers` package where the tokenizer's files allow it, because importing
transformers takes seconds.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from penstock.core.cache.stage import Source
from penstock.core.files import read_json_object
from penstock.core.sources.hub import local_folder
from penstock.core.sources.pin_remote import resolve_folder
from penstock.rows.byte_vocabulary import byte_library_tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

# Context in tokens that can change how a token decodes: a UTF-8 character may be split over several
# tokens, and a leading space may depend on the preceding token.
REACH = 16


class Decoder:
    """Decodes token ids of one vocabulary to text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)

    def is_special(self, token: int) -> bool:
        """Whether the token is special, such as the end of a turn, or not in the vocabulary."""
        return token in self._special or not self._knows(token)

    def text(self, ids: Sequence[int]) -> str:
        """Decode all ids. An id that is not in the vocabulary becomes `<unknown 151700>`."""
        parts: list[str] = []
        for is_known, run in groupby(ids, self._knows):
            if is_known:
                parts.append(self._tokenizer.decode(list(run), skip_special_tokens=False))
            else:
                # tokenizers leaves out ids that it does not know.
                parts += (f"<unknown {token}>" for token in run)
        return "".join(parts)

    def pieces(self, ids: Sequence[int], ends: Sequence[int]) -> Iterator[str]:
        """Yield the text of consecutive token spans; `ends` are increasing up to `len(ids)`.

        The concatenation equals `text(ids)`. A character whose bytes lie in two spans belongs to
        the later one.
        """
        low = yielded = 0  # decoding starts at token `low`; `yielded` characters of it are yielded
        for end in ends:
            text = self._settled(ids, low, end)
            yield text[yielded:]
            yielded = max(yielded, len(text))
            later = end - REACH
            # Move `low` forward to avoid decoding all earlier tokens again, if the text from there
            # is the same.
            if later > low and yielded == len(text) and text.endswith(self.text(ids[later:end])):
                low, yielded = later, len(self.text(ids[later:end]))

    def _settled(self, ids: Sequence[int], low: int, end: int) -> str:
        """Decode tokens `low` to `end`, up to the first character that later tokens change."""
        text = self.text(ids[low:end])
        if end == len(ids):
            return text
        more = self.text(ids[low : end + REACH])
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text, more, strict=False))
        return text if more.startswith(text) else text[: sum(1 for _ in same)]

    def _knows(self, token: int) -> bool:
        return self._tokenizer.id_to_token(token) is not None


def load_pinned_decoder(typed: str, tokenizer: Source) -> Decoder:
    """Load the decoder of a tokenizer at its pinned revision. Raises as `load_decoder`.

    `typed` is the path or hub id as the user wrote it.
    """
    path = resolve_folder(typed, tokenizer)
    if tokenizer.pin["kind"] == "hub":
        return load_decoder(path, local_folder(typed, tokenizer, TOKENIZER_FILES))
    return load_decoder(path, Path(path).expanduser())


def load_decoder(path: str, files: Path) -> Decoder:
    """Load the decoder of the tokenizer that `load_tokenizer` loads from `path`.

    `files` is the local folder with its files; unused for a built-in tokenizer. Raises ConfigError
    if the files cannot be used, CapabilityError if they cannot be fetched.
    """
    if path.startswith("builtin:"):
        return Decoder(byte_library_tokenizer())
    tokenizer = _library_tokenizer(files)
    if tokenizer is None:
        # Importing transformers takes seconds, and most tokenizers do not need it.
        from penstock.rows.tokenizer import load_tokenizer  # noqa: PLC0415

        loaded: Any = load_tokenizer(path)
        tokenizer = Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    return Decoder(tokenizer)


def _library_tokenizer(folder: Path) -> Tokenizer | None:
    """Load the folder with `tokenizers` alone; None if transformers would add tokens to it."""
    vocabulary, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not vocabulary.is_file():
        return None
    added = read_json_object(settings).get("added_tokens_decoder", {}) if settings.is_file() else {}
    try:
        tokenizer = Tokenizer.from_file(str(vocabulary))
    except Exception:  # noqa: BLE001 - the library raises nothing narrower
        return None
    is_known = all(tokenizer.id_to_token(int(number)) is not None for number in added)
    return tokenizer if is_known else None
