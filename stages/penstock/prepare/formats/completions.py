"""Where a prompt ends and an answer to it begins, in the ways that records tell it.

An answer is text, a message, or messages, alone or after the prompt. The prompt has a column of
its own, is what the answers have in common, or is a conversation that ends with the answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.prepare.bad_records import BadRecord, check_text, get_column, json_type_name
from penstock.prepare.formats.conversation import Conversation
from penstock.prepare.formats.messages import Turn, build_conversation, text_turn
from penstock.prepare.formats.sharegpt import parse_mixed_message, parse_mixed_messages
from penstock.prepare.settings import DatasetSettings

CONVERSATIONS = ("messages", "conversations")
"""Columns, and names in nested objects, that hold a whole conversation."""


@dataclass(frozen=True)
class Messages:
    """Messages and the place in the record that they come from. There is at least one."""

    where: str
    turns: Sequence[Turn]

    @property
    def is_conversation(self) -> bool:
        """Whether these are a conversation, rather than an answer alone."""
        return not self.turns[0].is_answer

    @property
    def ends_with_assistant(self) -> bool:
        """Whether the assistant has the last word."""
        return self.turns[-1].is_answer

    def starts_with(self, turns: Sequence[Turn]) -> bool:
        """Whether the messages are `turns`, or those and more."""
        return len(self.turns) >= len(turns) and all(map(messages_equal, self.turns, turns))

    def split_at(self, count: int) -> tuple["Messages", "Messages"]:
        """The first messages, as a prompt that an answer can follow, and the others.

        Raises BadRecord where they cannot be that.
        """
        if not count:
            raise BadRecord(
                "bad_value", f"{self.where} begins with the assistant, so it has no prompt"
            )
        if count == len(self.turns):
            raise BadRecord(
                "bad_value", f"{self.where} does not end with an answer of the assistant's"
            )
        prompt = Messages(self.where, self.turns[:count]).require_prompt()
        return prompt, Messages(self.where, self.turns[count:])

    def split_last_answer(self) -> tuple["Messages", "Messages"]:
        """What is said up to the assistant's last words, and those."""
        others = [place for place, turn in enumerate(self.turns) if not turn.is_answer]
        return self.split_at(others[-1] + 1 if others else 0)

    def require_prompt(self) -> "Messages":
        """Itself. Raises BadRecord where the answer stands already."""
        if self.ends_with_assistant:
            raise BadRecord(
                "bad_value",
                f"{self.where} ends with the assistant where the answer is yet to come",
            )
        return self

    def require_answer(self) -> "Messages":
        """Itself. Raises BadRecord where it is no answer or says nothing."""
        if not self.ends_with_assistant:
            raise BadRecord(
                "bad_value", f"{self.where} does not end with an answer of the assistant's"
            )
        if self.turns[-1].is_blank:
            raise BadRecord("empty", f"the answer in {self.where} is empty")
        return self


def read_prompt(settings: DatasetSettings, record: Mapping[str, Any]) -> Messages | None:
    """What is in `field_prompt`; None where the record has no such column, or null there."""
    name = settings.field_prompt
    return None if record.get(name) is None else parse_any_messages(name, record[name], "user")


def read_conversation(settings: DatasetSettings, record: Mapping[str, Any]) -> Messages | None:
    """The record's conversation in `field_messages`, or where it usually is; None without one."""
    if settings.field_messages:
        found = get_column(record, settings.field_messages)
        return Messages(
            settings.field_messages, parse_mixed_messages(settings.field_messages, found)
        )
    return _find_conversation("", record)


def parse_any_messages(where: str, value: Any, speaker: str) -> Messages:
    """What is said at `where`: text of the speaker, a message, or messages."""
    if isinstance(value, str):
        if not value.strip():
            raise BadRecord("empty", f"{where} is empty")
        return Messages(where, [text_turn(speaker, check_text(where, value))])
    if isinstance(value, list):
        return Messages(where, parse_mixed_messages(where, value))
    if not isinstance(value, dict):
        kind = json_type_name(value)
        raise BadRecord("wrong_type", f"{where} is {kind} where text or messages are meant")
    return _find_conversation(f"{where}.", value) or Messages(
        where, [parse_mixed_message(where, value)]
    )


def messages_equal(one: Turn, other: Turn) -> bool:
    """Whether two messages differ in nothing but the white space around their text."""
    return _stripped(one) == _stripped(other)


def missing_prompt(settings: DatasetSettings, record: Mapping[str, Any]) -> BadRecord:
    """Why a record without any prompt is of no use."""
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
    """The prompt, of which nothing is trained, and the answer."""
    untrained = [Turn(turn.message, trained=False) for turn in prompt.turns]
    return build_conversation(settings, record, [*untrained, *answer.turns], system)


def _find_conversation(prefix: str, value: Mapping[str, Any]) -> Messages | None:
    for name in CONVERSATIONS:
        if value.get(name) is not None:
            where = f"{prefix}{name}"
            return Messages(where, parse_mixed_messages(where, value[name]))
    return None


def _stripped(turn: Turn) -> dict[str, Any]:
    content = turn.message["content"]
    return {**turn.message, "content": content and content.strip()}
