"""`sharegpt`: conversations of `from` and `value`, tools called and answered in turns of their own.

Messages spelled as OpenAI's may stand among them. A call that follows the assistant's words or
other calls belongs to the same message, as it does where models speak.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.prepare.bad_records import BadRow, column
from penstock.prepare.formats.conversation import Conversation
from penstock.prepare.formats.messages import (
    OPENAI,
    Spelling,
    Turn,
    assembled,
    entries,
    is_trained,
    normalize_role,
    parse_message,
    usual_text,
)
from penstock.prepare.formats.tool_calls import parse_inline_calls
from penstock.prepare.settings import DatasetSettings

ROLES = {
    **OPENAI.roles,
    "human": "user",
    **dict.fromkeys((f"{maker}gpt" for maker in ("", "chat")), "assistant"),
    **dict.fromkeys(("bing", "bard", "bot", "model", "ai"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
}
SHAREGPT = Spelling("from", "value", ROLES)
MIXED = Spelling("role", "content", ROLES)

CALLS = ("function_call", "tool_call", "tool_calls")
"""Speakers whose words are calls of tools, as JSON."""


def sharegpt(settings: DatasetSettings, record: Mapping[str, Any]) -> Conversation:
    """The turns in `field_messages`, or `conversations`; a system prompt in `field_system`."""
    name = settings.field_messages or "conversations"
    turns = any_turns(name, column(record, name))
    return assembled(settings, record, turns, usual_text(record, settings.field_system, "system"))


def any_turns(where: str, value: Any) -> list[Turn]:
    """The messages in a list of them, each spelled in either way."""
    turns: list[Turn] = []
    for index, entry in entries(where, value):
        turn = any_turn(f"{where}[{index}]", entry)
        if turns and _continues(turns[-1], turn):
            turns[-1] = _joined(turns[-1], turn)
        else:
            turns.append(turn)
    return turns


def any_turn(where: str, value: Any) -> Turn:
    """A message, spelled in either way."""
    if not isinstance(value, dict):
        return parse_message(where, value, SHAREGPT)
    spelling = SHAREGPT if "from" in value or "role" not in value else MIXED
    said = value.get(spelling.role)
    if not isinstance(said, str) or normalize_role(said) not in CALLS:
        return parse_message(where, value, spelling)
    if spelling.content not in value:
        names = ", ".join(value)
        raise BadRow("missing_column", f"{where} has no {spelling.content}; it has {names}")
    calls = parse_inline_calls(f"{where}.{spelling.content}", value[spelling.content])
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    return Turn(message, is_trained(where, value.get("weight")))


def _continues(before: Turn, turn: Turn) -> bool:
    """Whether `turn` is nothing but calls, and the assistant has just spoken alike."""
    return (
        set(turn.message) == {"role", "content", "tool_calls"}
        and turn.message["content"] is None
        and before.is_answer
        and before.trained == turn.trained
    )


def _joined(before: Turn, turn: Turn) -> Turn:
    calls = [*before.message.get("tool_calls", ()), *turn.message["tool_calls"]]
    return replace(before, message={**before.message, "tool_calls": calls})
