"""`alpaca`: instruction, input, output and history; `instruction`: the same columns where they are
named. The output is trained."""

from collections.abc import Mapping
from typing import Any

from penstock.prepare.bad_records import (
    BadRecord,
    check_list,
    check_text,
    get_optional_text,
    get_text,
)
from penstock.prepare.formats.conversation import Conversation, Message
from penstock.prepare.formats.json_values import parse_json_text
from penstock.prepare.formats.messages import (
    Turn,
    build_conversation,
    get_text_or_default,
    text_turn,
)
from penstock.prepare.settings import DatasetSettings

HISTORY = "history"

BREAK = "\n\n"
"""Between a question and its context."""


def instruction(settings: DatasetSettings, record: Mapping[str, Any]) -> Conversation:
    """Parse `field_instruction` and `field_output`, and `field_input` and `field_system` if set."""
    question = get_text(record, settings.field_instruction)
    answer = get_text(record, settings.field_output)
    for name, value in (
        (settings.field_instruction, question),
        (settings.field_output, answer),
    ):
        if not value.strip():
            raise BadRecord("empty", f"{name} is empty")
    context = get_optional_text(record, settings.field_input)
    system = get_optional_text(record, settings.field_system)
    turns = [("system", system)] if system else []
    turns += [("user", f"{question}{BREAK}{context}" if context else question)]
    turns += [("assistant", answer)]
    messages: list[Message] = [{"role": role, "content": content} for role, content in turns]
    return Conversation(messages, None, (0.0,) * (len(messages) - 1) + (1.0,))


def alpaca(settings: DatasetSettings, record: Mapping[str, Any]) -> Conversation:
    """Parse a record: the instruction, and the answer in `field_output`."""
    question = question_turns(settings, record, settings.field_instruction)
    answer = get_text(record, settings.field_output)
    if not answer.strip():
        raise BadRecord("empty", f"{settings.field_output} is empty")
    turns = [*question, text_turn("assistant", answer)]
    return build_conversation(settings, record, turns, system_prompt(settings, record))


def question_turns(settings: DatasetSettings, record: Mapping[str, Any], name: str) -> list[Turn]:
    """The turns in `history`, then a user message of the columns `name` and `field_input`."""
    context = settings.field_input or "input"
    parts = [get_text(record, name)]
    # A prompt in the column `input` (field_prompt: input) is not its own context.
    if context != name:
        parts.append(get_text_or_default(record, settings.field_input, context))
    question = BREAK.join(part for part in parts if part.strip())
    if not question.strip():
        raise BadRecord("empty", f"{name} is empty")
    return [*_parse_history(record.get(HISTORY)), text_turn("user", question)]


def system_prompt(settings: DatasetSettings, record: Mapping[str, Any]) -> str:
    """The system prompt in `field_system`, or in `system`; empty if there is none."""
    return get_text_or_default(record, settings.field_system, "system")


def _parse_history(value: Any) -> list[Turn]:
    value = parse_json_text(HISTORY, value) if value else None
    turns: list[Turn] = []
    for index, entry in enumerate([] if value is None else check_list(HISTORY, value)):
        location = f"{HISTORY}[{index}]"
        if not isinstance(entry, list) or len(entry) != 2:
            raise BadRecord("wrong_type", f"{location} is not a list of a question and an answer")
        for position, role in enumerate(("user", "assistant")):
            turns.append(text_turn(role, check_text(f"{location}[{position}]", entry[position])))
    return turns
