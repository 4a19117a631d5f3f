"""Parsed records, independent of the format: conversations, preference pairs, rated completions."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from penstock.config.schema.dataset import Kind
from penstock.core.extensions import Part
from penstock.media.kinds import KINDS
from penstock.prepare.settings import DatasetSettings

Message = dict[str, Any]

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Message fields with reasoning content; chat templates read one of them."""


@dataclass(slots=True)
class Conversation:
    """Messages in OpenAI's chat format, as passed to the chat template."""

    messages: list[Message]
    """Each has a `role` (`system`, `user`, `assistant` or `tool`) and a `content`: text, null for
    assistant messages with `tool_calls`, whose `arguments` are objects, or parts (`formats.images`)
    in messages with media, which are not the assistant's."""

    tools: list[dict[str, Any]] | None
    """Tool definitions, each `{"type": "function", "function": {…}}`."""

    weights: tuple[float, ...]
    """Loss weight of each message; 0, which is not trained, where `roles_to_train` lacks its role,
    or the record excludes it."""

    unplaced: Mapping[str, int] = field(default_factory=dict)
    """Number of images and the like of the record for which its messages have no place, by kind."""

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template that the record sets (column `chat_template_kwargs`)."""

    ranges: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """[start, stop) of the characters that are trained, by index of the message; of other messages
    all are."""

    @property
    def trained(self) -> tuple[bool, ...]:
        """Whether each message is trained."""
        return tuple(weight > 0 for weight in self.weights)

    @property
    def media(self) -> list[tuple[str, Any]]:
        """(kind, reference) of the images and the like of its messages, in order."""
        return [
            (part["type"], part[part["type"]])
            for message in self.messages
            if isinstance(message["content"], list)
            for part in message["content"]
            if part["type"] in KINDS
        ]

    @property
    def several(self) -> set[str]:
        """The kinds of which it has several."""
        counts = Counter(kind for kind, _ in self.media)
        return {kind for kind, count in counts.items() if count > 1}

    @property
    def begins_with_assistant(self) -> bool:
        """Whether the first message after system prompts is the assistant's."""
        for message in self.messages:
            if message["role"] != "system":
                return message["role"] == "assistant"
        return False

    @property
    def has_blank_answer(self) -> bool:
        """Whether a trained message has neither text nor tool calls."""
        for message, weight in zip(self.messages, self.weights, strict=True):
            if weight and message["role"] == "assistant" and not message.get("tool_calls"):
                content = message["content"]
                if not content or content.isspace():
                    return True
        return False


@dataclass(slots=True)
class PreferencePair:
    """Two completions of the same prompt; only the completions are trained."""

    chosen: Conversation
    rejected: Conversation
    score_gap: float | None = None
    """Chosen score minus rejected score; None without scores."""


@dataclass(slots=True)
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
    loss_weights: npt.NDArray[np.float32] | None = None
    """Loss weight of each label; None: 1."""


Parsed = Conversation | PreferencePair | RatedCompletion | Text | TokenizedSample


def conversations(parsed: Parsed) -> list[Conversation]:
    """The conversations of a record; both of a pair."""
    if isinstance(parsed, Conversation):
        return [parsed]
    if isinstance(parsed, PreferencePair):
        return [parsed.chosen, parsed.rejected]
    return [parsed.conversation] if isinstance(parsed, RatedCompletion) else []


def map_conversations(parsed: Parsed, change: Callable[[Conversation], Conversation]) -> Parsed:
    """The record with its conversations changed."""
    if isinstance(parsed, Conversation):
        return change(parsed)
    if isinstance(parsed, PreferencePair):
        return replace(parsed, chosen=change(parsed.chosen), rejected=change(parsed.rejected))
    if isinstance(parsed, RatedCompletion):
        return replace(parsed, conversation=change(parsed.conversation))
    return parsed


Record = Mapping[str, Any]
Format = Callable[[DatasetSettings, Record], Parsed]
"""Parses a record. Raises BadRecord if it cannot be used."""

RESULTS: Mapping[Kind, type[Conversation | PreferencePair | RatedCompletion]] = {
    "sft": Conversation,
    "preference": PreferencePair,
    "kto": RatedCompletion,
}
"""What formats of packages return."""


class DatasetFormat(Part, ABC):
    """A dataset format of a package (`penstock.formats`), with its options as fields."""

    kind: ClassVar[Kind] = "sft"
    """What its samples are used for; see RESULTS."""

    @abstractmethod
    def parse(self, record: Record) -> Conversation | PreferencePair | RatedCompletion:
        """Parse a record, a mapping from column to value. Raises BadRecord if it cannot be used."""
