"""Token ids as text for people: special tokens are kept, and no id is passed over in silence.

It stands on the package `tokenizers` alone where the tokenizer's files allow that: transformers
takes seconds to import.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from penstock.core.cache.stage import Source
from penstock.core.files import read_json
from penstock.core.sources.hub import local_folder
from penstock.core.sources.pin_remote import resolve_folder
from penstock.rows.byte_vocabulary import byte_library_tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

REACH = 16
"""Tokens on either side that may decide how a token reads: its bytes may be part of a character,
and a blank before it may depend on what stands there."""


class Decoder:
    """One vocabulary, from ids to text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)

    def is_special(self, token: int) -> bool:
        """Whether it is a mark of the format, such as the end of a turn, or unknown."""
        return token in self._special or not self._knows(token)

    def text(self, ids: Sequence[int]) -> str:
        """All of it. An id that is not in the vocabulary reads `<unknown 151700>`."""
        parts: list[str] = []
        for known, run in groupby(ids, self._knows):
            if known:
                parts.append(self._tokenizer.decode(list(run), skip_special_tokens=False))
            else:
                parts += (f"<unknown {token}>" for token in run)
        return "".join(parts)

    def pieces(self, ids: Sequence[int], ends: Sequence[int]) -> Iterator[str]:
        """The text of consecutive runs of tokens; `ends` rises to `len(ids)`.

        Together they read as all of it does. A character whose bytes lie in two runs is the latter
        one's.
        """
        low = told = 0  # what precedes token `low` is told, and so many characters from there on
        for end in ends:
            text = self._settled(ids, low, end)
            yield text[told:]
            told = max(told, len(text))
            later = end - REACH
            # What is told need not be decoded again, if the text can be read from there on.
            if later > low and told == len(text) and text.endswith(self.text(ids[later:end])):
                low, told = later, len(self.text(ids[later:end]))

    def _settled(self, ids: Sequence[int], low: int, at: int) -> str:
        """The text of tokens `low` to `at`, as far as those after it leave it as it is."""
        here = self.text(ids[low:at])
        if at == len(ids):
            return here
        more = self.text(ids[low : at + REACH])
        same = takewhile(lambda pair: pair[0] == pair[1], zip(here, more, strict=False))
        return here if more.startswith(here) else here[: sum(1 for _ in same)]

    def _knows(self, token: int) -> bool:
        return self._tokenizer.id_to_token(token) is not None


def decoder_of(typed: str, tokenizer: Source) -> Decoder:
    """The vocabulary of the tokenizer that the user typed, as it is pinned; raises what
    `load_decoder` does."""
    path = resolve_folder(typed, tokenizer)
    if tokenizer.pin["kind"] == "hub":
        return load_decoder(path, local_folder(typed, tokenizer, TOKENIZER_FILES))
    return load_decoder(path, Path(path).expanduser())


def load_decoder(path: str, files: Path) -> Decoder:
    """The vocabulary of the tokenizer that `load_tokenizer` finds at `path`; `files` is the folder
    on this machine with its files, for one that is not built in.

    Raises ConfigError when they cannot be used, CapabilityError when they cannot be fetched.
    """
    if path.startswith("builtin:"):
        return Decoder(byte_library_tokenizer())
    tokenizer = _library_tokenizer(files)
    if tokenizer is None:
        # It takes seconds to import, which most tokenizers are spared.
        from penstock.rows.tokenizer import load_tokenizer  # noqa: PLC0415

        loaded: Any = load_tokenizer(path)
        tokenizer = Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    return Decoder(tokenizer)


def _library_tokenizer(folder: Path) -> Tokenizer | None:
    """What `tokenizers` makes of the folder; None where transformers would make more of it."""
    vocabulary, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not vocabulary.is_file():
        return None
    added = read_json(settings).get("added_tokens_decoder", {}) if settings.is_file() else {}
    try:
        tokenizer = Tokenizer.from_file(str(vocabulary))
    except Exception:  # noqa: BLE001 - the library raises nothing narrower
        return None
    known = all(tokenizer.id_to_token(int(number)) is not None for number in added)
    return tokenizer if known else None
