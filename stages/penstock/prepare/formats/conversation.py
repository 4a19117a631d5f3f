"""What a record says, whatever its format: a conversation, a pair of them, or a judged one.

The formats that parse records end here; how it becomes text and tokens is told elsewhere.
"""

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which a message has what was thought before its words; templates read one of them."""


@dataclass(frozen=True)
class Conversation:
    """Messages in the form of OpenAI's chat, exactly as a chat template gets them."""

    messages: list[Message]
    """Each has a `role` (`system`, `user`, `assistant` or `tool`) and a `content`: text, or null
    beside the `tool_calls` of an assistant, whose `arguments` are objects."""

    tools: list[dict[str, Any]] | None
    """What the model may call, each as `{"type": "function", "function": {…}}`."""

    trained: tuple[bool, ...]
    """Whether a message may be trained, one for each. Only the assistant's are."""

    @property
    def begins_with_assistant(self) -> bool:
        """Whether an answer comes before anything is asked; a system prompt asks nothing."""
        roles = (message["role"] for message in self.messages)
        return next((role for role in roles if role != "system"), None) == "assistant"

    @property
    def has_blank_answer(self) -> bool:
        """Whether an answer that is trained says nothing and calls nothing."""
        return any(
            trained and not message.get("tool_calls") and not (message["content"] or "").strip()
            for message, trained in zip(self.messages, self.trained, strict=True)
        )


@dataclass(frozen=True)
class PreferencePair:
    """A prompt with two answers. The prompt's messages are the same, and only answers trained."""

    chosen: Conversation
    rejected: Conversation
    score_gap: float | None = None
    """By how much the chosen answer is scored higher, where answers are scored."""


@dataclass(frozen=True)
class RatedCompletion:
    """A prompt and an answer, which alone is trained, with a verdict on it."""

    conversation: Conversation
    desirable: bool
