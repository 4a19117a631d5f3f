"""Where a prompt ends and an answer to it begins, in the ways that records tell it.

An answer is text, a message, or messages, alone or after the prompt. The prompt has a column of
its own, is what the answers have in common, or is a conversation that ends with the answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.prepare.bad_records import BadRow, checked_text, column, json_type_name
from penstock.prepare.formats.conversation import Conversation
from penstock.prepare.formats.messages import Turn, assembled, text_turn
from penstock.prepare.formats.sharegpt import any_turn, any_turns
from penstock.prepare.settings import DatasetSettings

CONVERSATIONS = ("messages", "conversations")
"""Columns, and names in nested objects, that hold a whole conversation."""


@dataclass(frozen=True)
class Said:
    """Messages and the place in the record that they come from. There is at least one."""

    where: str
    turns: Sequence[Turn]

    @property
    def is_whole(self) -> bool:
        """Whether these are a conversation, rather than an answer alone."""
        return not self.turns[0].is_answer

    @property
    def is_answered(self) -> bool:
        """Whether the assistant has the last word."""
        return self.turns[-1].is_answer

    def begins_with(self, turns: Sequence[Turn]) -> bool:
        """Whether the messages are `turns`, or those and more."""
        return len(self.turns) >= len(turns) and all(map(messages_equal, self.turns, turns))

    def parted(self, count: int) -> tuple["Said", "Said"]:
        """The first messages, as a prompt that an answer can follow, and the others.

        Raises BadRow where they cannot be that.
        """
        if not count:
            raise BadRow(
                "bad_value", f"{self.where} begins with the assistant, so it has no prompt"
            )
        if count == len(self.turns):
            raise BadRow(
                "bad_value", f"{self.where} does not end with an answer of the assistant's"
            )
        prompt = Said(self.where, self.turns[:count]).as_prompt()
        return prompt, Said(self.where, self.turns[count:])

    def before_its_answer(self) -> tuple["Said", "Said"]:
        """What is said up to the assistant's last words, and those."""
        others = [place for place, turn in enumerate(self.turns) if not turn.is_answer]
        return self.parted(others[-1] + 1 if others else 0)

    def as_prompt(self) -> "Said":
        """Itself. Raises BadRow where the answer stands already."""
        if self.is_answered:
            raise BadRow(
                "bad_value",
                f"{self.where} ends with the assistant where the answer is yet to come",
            )
        return self

    def as_answer(self) -> "Said":
        """Itself. Raises BadRow where it is no answer or says nothing."""
        if not self.is_answered:
            raise BadRow(
                "bad_value", f"{self.where} does not end with an answer of the assistant's"
            )
        if self.turns[-1].is_blank:
            raise BadRow("empty", f"the answer in {self.where} is empty")
        return self


def read_prompt(settings: DatasetSettings, record: Mapping[str, Any]) -> Said | None:
    """What is in `field_prompt`; None where the record has no such column, or null there."""
    name = settings.field_prompt
    return None if record.get(name) is None else messages_at(name, record[name], "user")


def read_conversation(settings: DatasetSettings, record: Mapping[str, Any]) -> Said | None:
    """The record's conversation in `field_messages`, or where it usually is; None without one."""
    if settings.field_messages:
        found = column(record, settings.field_messages)
        return Said(settings.field_messages, any_turns(settings.field_messages, found))
    return _nested("", record)


def messages_at(where: str, value: Any, speaker: str) -> Said:
    """What is said at `where`: text of the speaker, a message, or messages."""
    if isinstance(value, str):
        if not value.strip():
            raise BadRow("empty", f"{where} is empty")
        return Said(where, [text_turn(speaker, checked_text(where, value))])
    if isinstance(value, list):
        return Said(where, any_turns(where, value))
    if not isinstance(value, dict):
        kind = json_type_name(value)
        raise BadRow("wrong_type", f"{where} is {kind} where text or messages are meant")
    return _nested(f"{where}.", value) or Said(where, [any_turn(where, value)])


def messages_equal(one: Turn, other: Turn) -> bool:
    """Whether two messages differ in nothing but the white space around their text."""
    return _stripped(one) == _stripped(other)


def no_prompt(settings: DatasetSettings, record: Mapping[str, Any]) -> BadRow:
    """Why a record without any prompt is of no use."""
    try:
        column(record, settings.field_prompt)
    except BadRow as fault:
        return fault
    return BadRow("wrong_type", f"{settings.field_prompt} is null")


def answered(
    settings: DatasetSettings,
    record: Mapping[str, Any],
    prompt: Said,
    answer: Said,
    system: str | None = None,
) -> Conversation:
    """The prompt, of which nothing is trained, and the answer."""
    untrained = [Turn(turn.message, trained=False) for turn in prompt.turns]
    return assembled(settings, record, [*untrained, *answer.turns], system)


def _nested(prefix: str, value: Mapping[str, Any]) -> Said | None:
    for name in CONVERSATIONS:
        if value.get(name) is not None:
            where = f"{prefix}{name}"
            return Said(where, any_turns(where, value[name]))
    return None


def _stripped(turn: Turn) -> dict[str, Any]:
    content = turn.message["content"]
    return {**turn.message, "content": content and content.strip()}
