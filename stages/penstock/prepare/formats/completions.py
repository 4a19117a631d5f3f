"""Split records of preference data and KTO into prompt and completion.

A completion is text, a message, or messages, with or without the prompt before it. The prompt has
its own column, is the common prefix of both completions, or is a conversation that ends with the
completion.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.prepare.bad_records import BadRecord, check_text, get_column, json_type_name
from penstock.prepare.formats.alpaca import question_turns, system_prompt
from penstock.prepare.formats.conversation import Conversation
from penstock.prepare.formats.message_keys import message_keys
from penstock.prepare.formats.messages import (
    Turn,
    build_conversation,
    parse_message,
    parse_messages,
    text_turn,
)
from penstock.prepare.settings import DatasetSettings

CONVERSATIONS = ("messages", "conversations")
"""Columns, and members of nested objects, with a whole conversation."""


@dataclass(slots=True)
class Messages:
    """One or more messages, and their location in the record (`where`)."""

    where: str
    turns: Sequence[Turn]

    @property
    def is_conversation(self) -> bool:
        """Whether they start with a prompt, rather than being a completion only."""
        return not self.turns[0].is_answer

    @property
    def ends_with_assistant(self) -> bool:
        """Whether the last message is the assistant's."""
        return self.turns[-1].is_answer

    def starts_with(self, turns: Sequence[Turn]) -> bool:
        """Whether `turns` are a prefix of the messages."""
        return len(self.turns) >= len(turns) and all(map(messages_equal, self.turns, turns))

    def split_at(self, count: int) -> tuple["Messages", "Messages"]:
        """Split into the first `count` messages (the prompt) and the rest (the completion).

        Raises BadRecord if either is empty or the prompt ends with the assistant.
        """
        if not count:
            why = f"{self.where} begins with the assistant, so it has no prompt"
            raise BadRecord("bad_value", why)
        if count == len(self.turns):
            raise self._no_answer()
        prompt = Messages(self.where, self.turns[:count]).require_prompt()
        return prompt, Messages(self.where, self.turns[count:])

    def split_last_answer(self) -> tuple["Messages", "Messages"]:
        """Split before the final assistant messages."""
        prompt_turns = [index for index, turn in enumerate(self.turns) if not turn.is_answer]
        return self.split_at(prompt_turns[-1] + 1 if prompt_turns else 0)

    def require_prompt(self) -> "Messages":
        """Return self. Raises BadRecord if it ends with the assistant."""
        if self.ends_with_assistant:
            why = f"{self.where} ends with the assistant where the answer is yet to come"
            raise BadRecord("bad_value", why)
        return self

    def require_answer(self) -> "Messages":
        """Return self. Raises BadRecord if it does not end with a non-empty assistant message."""
        if not self.ends_with_assistant:
            raise self._no_answer()
        if self.turns[-1].is_blank:
            raise BadRecord("empty", f"the answer in {self.where} is empty")
        return self

    def _no_answer(self) -> BadRecord:
        why = f"{self.where} does not end with an answer of the assistant's"
        return BadRecord("bad_value", why)


def read_prompt(settings: DatasetSettings, record: Mapping[str, Any]) -> Messages | None:
    """The messages in `field_prompt`, or those of a text with `history` and `field_input`; None if
    the record has no such column or it is null."""
    name = settings.field_prompt
    if record.get(name) is None:
        return None
    if isinstance(record[name], str):
        return Messages(name, question_turns(settings, record, name))
    return parse_any_messages(settings, name, record[name], "user")


def read_conversation(settings: DatasetSettings, record: Mapping[str, Any]) -> Messages | None:
    """The conversation in `field_messages`, or in a default column; None without one."""
    if name := settings.field_messages:
        keys = message_keys(settings)
        return Messages(name, parse_messages(name, get_column(record, name), keys))
    return _find_conversation(settings, "", record)


def parse_any_messages(
    settings: DatasetSettings, location: str, value: Any, speaker: str
) -> Messages:
    """Parse text (a message with role `speaker`), a message, or a list of messages."""
    if isinstance(value, str):
        if not value.strip():
            raise BadRecord("empty", f"{location} is empty")
        return Messages(location, [text_turn(speaker, check_text(location, value))])
    if isinstance(value, list):
        return Messages(location, parse_messages(location, value, message_keys(settings)))
    if not isinstance(value, dict):
        kind = json_type_name(value)
        raise BadRecord("wrong_type", f"{location} is {kind} where text or messages are meant")
    return _find_conversation(settings, f"{location}.", value) or Messages(
        location, [parse_message(location, value, message_keys(settings))]
    )


def messages_equal(first: Turn, second: Turn) -> bool:
    """Whether two messages are equal, ignoring white space around their text."""
    return _stripped(first) == _stripped(second)


def missing_prompt(settings: DatasetSettings, record: Mapping[str, Any]) -> BadRecord:
    """Error for a record without a prompt."""
    try:
        get_column(record, settings.field_prompt)
    except BadRecord as fault:
        return fault
    return BadRecord("wrong_type", f"{settings.field_prompt} is null")


def build_completion(
    settings: DatasetSettings,
    record: Mapping[str, Any],
    prompt: Messages,
    answer: Messages,
    system: str | None = None,
) -> Conversation:
    """Build a conversation of an untrained prompt and a trained completion, of which no message has
    a loss weight other than 0 and 1: its loss is one of whole sequences."""
    for turn in answer.turns:
        if turn.weight not in (0, 1):
            why = f"{answer.where} has a message of weight {turn.weight:g}; write 0 or 1 in pairs"
            raise BadRecord("bad_value", f"{why} and rated completions")
    untrained = [Turn(turn.message) for turn in prompt.turns]
    if system is None:
        system = system_prompt(settings, record)
    return build_conversation(settings, record, [*untrained, *answer.turns], system)


def _find_conversation(
    settings: DatasetSettings, prefix: str, value: Mapping[str, Any]
) -> Messages | None:
    for name in CONVERSATIONS:
        if value.get(name) is not None:
            location = f"{prefix}{name}"
            return Messages(location, parse_messages(location, value[name], message_keys(settings)))
    return None


def _stripped(turn: Turn) -> dict[str, Any]:
    content = turn.message["content"]
    return {**turn.message, "content": content.strip() if isinstance(content, str) else content}
