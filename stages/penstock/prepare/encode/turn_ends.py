"""Where the words of a message end in a rendered text, and which token ends its turn.

A turn ends with a stop token (the tokenizer's EOS token, or one in `eos_token_id` of
generation_config.json), or with the first added token that the chat template writes after every
answer. If that is no stop token, but one follows directly, the turn ends there: without it, a
server would not stop. A stop token may also be the marker of the next role (GLM-4's `<|user|>`).
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class Turn:
    """A message in the rendered text. All places are in characters."""

    message: int
    """Its index."""
    start: int
    words_end: int
    end: tuple[int, int] | None
    """[start, stop) of the tokens that end it; None if there is none."""
    earlier: tuple[tuple[int, int], ...] = ()
    """Words before `start`, for templates that mark them in several parts."""
    ranges: tuple[tuple[int, int], ...] | None = None
    """The only parts of its words that are trained; None: all are."""


class TurnEnds:
    """Finds the ends of turns in texts of one tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Collection[int] = ()
    ) -> None:
        """`stop_token_ids`: those of the generation config."""
        added = tokenizer.added_tokens_decoder
        contents = {index: token.content for index, token in added.items()}
        stops = {contents[index] for index in stop_token_ids if index in contents}
        if tokenizer.eos_token is not None:
            stops.add(str(tokenizer.eos_token))
        self._stops = stops
        self._special = {token.content for token in added.values() if token.special} | stops
        # Some tokenizers have runs of blanks as added tokens, which end nothing.
        named = {content for content in contents.values() if content.strip()} | stops
        # Longest first: an alternation takes the first that matches, which may begin another one.
        pattern = "|".join(map(re.escape, sorted(named, key=len, reverse=True))) or r"(?!)"
        self._added = re.compile(pattern)
        self._next = re.compile(rf"\s*({pattern})")
        self._last = re.compile(rf"({pattern})\s*\Z")
        self._first_of_tails: dict[str, tuple[int, int]] = {}

    def closing(self, tail: str) -> str:
        """What the template writes after every answer, up to the first added token; empty if it
        writes none. `tail`: the text after an answer that is the last message."""
        return tail[: self._first_added(tail)[1]]

    def _first_added(self, tail: str) -> tuple[int, int]:
        if tail not in self._first_of_tails:
            first = self._added.search(tail)
            self._first_of_tails[tail] = first.span() if first else (0, 0)
        return self._first_of_tails[tail]

    def words_end(self, text: str, start: int, stop: int, tail: str | None) -> int:
        """End of the words in [start, stop), which may also contain what ends the turn."""
        closing = self.closing(tail or "")
        if closing and text.startswith(closing, stop):
            return stop
        region = text[start:stop].rstrip()
        for suffix in ((tail or "").rstrip(), closing):
            if suffix and region.endswith(suffix):
                return start + len(region) - len(suffix)
        last = self._last.search(region)
        # Templates that end turns may end some of them otherwise, for example those with calls.
        ends = self._special if closing or tail is None else self._stops
        return start + last.start() if last and last[1] in ends else stop

    def find_end(
        self, text: str, words_end: int, stop: int, tail: str | None
    ) -> tuple[int, int] | None:
        """[start, stop) of the tokens that end the turn after its words; `stop` is the end of what
        is known to belong to the turn."""
        first, last = self._first_added(tail or "")
        closing = (tail or "")[:last]
        if closing and text.startswith(closing, words_end):
            token, start, end = closing[first:], words_end + first, words_end + last
        else:
            following = self._next.match(text, words_end)
            if not following:
                return None
            token, (start, end) = following[1], following.span(1)
            if token not in self._stops and end > stop:
                return None
        if token not in self._stops:
            following = self._next.match(text, end)
            if following and following[1] in self._stops:
                end = following.end()
        return start, end

    def find_token(self, text: str, offset: int, tail: str, closing: str) -> tuple[int, int] | None:
        """[start, stop) of the first token in `tail` that ends turns, if `text` has this part of
        `tail` at `offset`. `closing`: what ends answers."""
        ends = {token[0] for token in self._added.finditer(closing)} | self._stops
        for token in self._added.finditer(tail):
            if token[0] in ends:
                is_there = text.startswith(tail[: token.end()], offset)
                return (offset + token.start(), offset + token.end()) if is_there else None
        return None
