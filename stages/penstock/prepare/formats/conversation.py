"""Parsed records, independent of the format: conversations, preference pairs, rated completions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.prepare.settings import DatasetSettings

Message = dict[str, Any]

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Message fields with reasoning content; chat templates read one of them."""


@dataclass(frozen=True)
class Conversation:
    """Messages in OpenAI's chat format, as passed to the chat template."""

    messages: list[Message]
    """Each has a `role` (`system`, `user`, `assistant` or `tool`) and a `content`: text, or null
    for assistant messages with `tool_calls`, whose `arguments` are objects."""

    tools: list[dict[str, Any]] | None
    """Tool definitions, each `{"type": "function", "function": {…}}`."""

    trained: tuple[bool, ...]
    """Whether each message may be trained; false for all but assistant messages."""

    @property
    def begins_with_assistant(self) -> bool:
        """Whether the first message after system prompts is the assistant's."""
        roles = (message["role"] for message in self.messages)
        return next((role for role in roles if role != "system"), None) == "assistant"

    @property
    def has_blank_answer(self) -> bool:
        """Whether a trained message has neither text nor tool calls."""
        return any(
            trained and not message.get("tool_calls") and not (message["content"] or "").strip()
            for message, trained in zip(self.messages, self.trained, strict=True)
        )


@dataclass(frozen=True)
class PreferencePair:
    """Two completions of the same prompt; only the completions are trained."""

    chosen: Conversation
    rejected: Conversation
    score_gap: float | None = None
    """Chosen score minus rejected score; None without scores."""


@dataclass(frozen=True)
class RatedCompletion:
    """A prompt and a trained completion that is desirable or not (KTO)."""

    conversation: Conversation
    desirable: bool


Tokens = npt.NDArray[np.int32]


@dataclass(slots=True)
class Text:
    """A document; all of its tokens are trained."""

    text: str


@dataclass(slots=True)
class TokenizedSample:
    """A tokenized record: `labels[t]` is `input_ids[t]` if trained, else -100."""

    input_ids: Tokens
    labels: Tokens


Parsed = Conversation | PreferencePair | RatedCompletion | Text | TokenizedSample
Record = Mapping[str, Any]
Format = Callable[[DatasetSettings, Record], Parsed]
"""Parses a record. Raises BadRecord if it cannot be used."""
