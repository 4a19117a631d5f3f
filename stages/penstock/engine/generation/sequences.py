"""Generation requests and results: prompts, decoding sequences and completions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from penstock.engine.generation.sampling import SamplingParams, uniform
from penstock.rows.reader import RowImage

Decode = Callable[[Sequence[int]], str]
"""Decodes tokens to text, special tokens included; the same on all ranks."""

Ending = Literal["stop", "length"]

# UTF-8 has up to four bytes for a character, and a token may be a single byte.
# A character may begin so many tokens before the token that completes it.
MAX_TOKENS_PER_CHARACTER = 4


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt with its request."""

    tokens: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_completions: int = 1
    needs_prompt_logprobs: bool = False
    prompt_top_k: int = 0
    """The number of top-k logprobs at each prompt position."""
    top_k: int = 0
    """The number of top-k logprobs at each completion position."""
    images: Sequence[RowImage] = ()
    """In the order of their tokens, which are in `tokens`."""

    @property
    def needs_logprobs(self) -> bool:
        return self.needs_prompt_logprobs or self.prompt_top_k > 0

    def max_new_tokens(self, context_length: int) -> int:
        """Tokens of a completion at most, by a model with this context."""
        room, most = context_length - len(self.tokens), self.sampling.max_tokens
        return room if most is None else min(room, most)


class TopKLogprobs(NamedTuple):
    """Top-k tokens at each of T positions, most likely first; on the host."""

    tokens_TK: torch.Tensor  # noqa: N815 - T and K name the dimensions
    """int32; -1 where there is no prediction."""
    log_probs_TK: torch.Tensor  # noqa: N815 - T and K name the dimensions
    """fp32, at temperature 1; NaN where there is no prediction."""


@dataclass(frozen=True)
class Completion:
    """A sampled completion."""

    tokens: list[int]
    """Includes the stop token."""
    log_probs: list[float]
    """The log-prob of each token under the model at temperature 1."""
    finish_reason: Ending
    top_k_logprobs: TopKLogprobs | None
    """None: not requested."""


@dataclass(frozen=True)
class GenerationOutput:
    """The result of a prompt of T tokens. Its first token has no prediction."""

    completions: list[Completion]
    log_probs_T: torch.Tensor | None  # noqa: N815 - T names the dimension
    """fp32 on the host, the first NaN; None: not requested."""
    top_k_logprobs: TopKLogprobs | None


# By identity, so that what is recorded of a sequence is found by it.
@dataclass(eq=False)
class DecodingSequence:
    """A completion in progress."""

    index: int
    """The index among all sequences that are not finished."""
    prompt_index: int
    prompt: Prompt
    sample: int
    max_tokens: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: Ending | None = None
    replica: int = 0
    """The replica that computes it."""
    skipped_positions: int = 0
    """By how much the RoPE positions of the completion are below the indices of its tokens: an
    image has fewer positions than tokens (M-RoPE)."""

    @property
    def all_tokens(self) -> list[int]:
        """The prompt's, and those of the completion."""
        return [*self.prompt.tokens, *self.tokens]

    @property
    def position(self) -> int:
        """The RoPE position of the newest token."""
        return len(self.prompt.tokens) + len(self.tokens) - 1 - self.skipped_positions

    @property
    def needs_kv_cache(self) -> bool:
        """Whether it needs the KV cache: more than one token is requested."""
        return self.max_tokens > 1

    @property
    def max_length(self) -> int:
        return len(self.prompt.tokens) + self.max_tokens

    def uniform(self) -> float:
        return uniform(self.seed, self.sample, len(self.tokens))

    def append(self, token: int, log_prob: float, decode: Decode | None) -> None:
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if self.max_tokens and (
            token in self.prompt.sampling.stop_tokens or self._hits_stop_string(decode)
        ):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"

    def to_completion(self, top_k_logprobs: TopKLogprobs | None) -> Completion:
        assert self.finish_reason
        # A prompt without requested tokens only passed through the model for its logprobs.
        tokens, log_probs = self.tokens[: self.max_tokens], self.log_probs[: self.max_tokens]
        return Completion(tokens, log_probs, self.finish_reason, top_k_logprobs)

    def _hits_stop_string(self, decode: Decode | None) -> bool:
        texts = self.prompt.sampling.stop_texts
        if not texts or decode is None:
            return False
        # A token is at least one byte, and an earlier match would have stopped before.
        width = max(len(text.encode()) for text in texts) + MAX_TOKENS_PER_CHARACTER
        recent_text = decode(self.tokens[-width:])
        return any(text in recent_text for text in texts)
