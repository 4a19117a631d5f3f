"""What a model is asked to write, and what it has written: prompts, answers, and when these end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from penstock.engine.generation.sampling import SamplingParams, uniform

Decode = Callable[[Sequence[int]], str]
"""Tokens to text, special ones included; the same on all ranks."""

Ending = Literal["stop", "length"]

SPLIT_CHARACTER = 4
"""A character may begin so many tokens before the one that completes it."""


@dataclass(frozen=True)
class Prompt:
    """Tokens, and what is wanted of them."""

    tokens: Sequence[int]
    how: SamplingParams = field(default_factory=SamplingParams)
    count: int = 1
    """Answers, each drawn anew."""
    scored: bool = False
    """Whether the log-probabilities of its own tokens are told."""
    likeliest: int = 0
    """For so many of the likeliest tokens in each place of it the log-probabilities are told."""
    likeliest_drawn: int = 0
    """The same in each place of its answers."""

    @property
    def is_read(self) -> bool:
        """Whether anything is told of its own tokens."""
        return self.scored or self.likeliest > 0


class TopKLogprobs(NamedTuple):
    """The likeliest tokens in each of T places, the likeliest first; on the host."""

    tokens_TK: torch.Tensor  # noqa: N815 - T and K name the dimensions
    """int32; -1 where nothing foretells."""
    log_probs_TK: torch.Tensor  # noqa: N815 - T and K name the dimensions
    """fp32, at temperature 1; NaN where nothing foretells."""


@dataclass(frozen=True)
class Completion:
    """What was drawn after a prompt."""

    tokens: list[int]
    """Also the one that stopped it."""
    log_probs: list[float]
    """Of each token as the model has it, at temperature 1."""
    ended: Ending
    likeliest: TopKLogprobs | None
    """In the place of each token; None: not asked."""


@dataclass(frozen=True)
class GenerationOutput:
    """All there is to a prompt of T tokens. Its first token nothing foretells."""

    answers: list[Completion]
    log_probs_T: torch.Tensor | None  # noqa: N815 - T names the dimension
    """fp32 on the host, the first NaN; None: not asked."""
    likeliest: TopKLogprobs | None
    """In the place of each token; None: not asked."""


@dataclass
class DecodingSequence:
    """One answer on its way."""

    number: int
    """Among all answers to all prompts."""
    prompt_number: int
    prompt: Prompt
    sample: int
    """Among those to its prompt."""
    most: int
    """Tokens at most."""
    seed: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    ended: Ending | None = None

    @property
    def is_kept(self) -> bool:
        """Whether its prompt is asked for more than one token."""
        return self.most > 1

    @property
    def longest(self) -> int:
        """Tokens of its prompt and itself at most."""
        return len(self.prompt.tokens) + self.most

    def uniform(self) -> float:
        """What its next token is drawn by."""
        return uniform(self.seed, self.sample, len(self.tokens))

    def add(self, token: int, log_prob: float, decode: Decode | None) -> None:
        """The next token, by which it may end."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if self.most and (token in self.prompt.how.stop_tokens or self._says_stop(decode)):
            self.ended = "stop"
        elif len(self.tokens) >= self.most:
            self.ended = "length"

    def answer(self, likeliest: TopKLogprobs | None) -> Completion:
        """Once it has ended."""
        assert self.ended
        # A prompt without any answer was passed through the model to be read.
        tokens, log_probs = self.tokens[: self.most], self.log_probs[: self.most]
        return Completion(tokens, log_probs, self.ended, likeliest)

    def _says_stop(self, decode: Decode | None) -> bool:
        texts = self.prompt.how.stop_texts
        if not texts or decode is None:
            return False
        # No token is less than a byte, and a text that ended earlier would have been seen then.
        width = max(len(text.encode()) for text in texts) + SPLIT_CHARACTER
        said = decode(self.tokens[-width:])
        return any(text in said for text in texts)
