"""`sharegpt`: conversations of `from` and `value`, tools called and answered in turns of their own.

Messages spelled as OpenAI's may stand among them. A call that follows the assistant's words or
other calls belongs to the same message, as it does where models speak.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.prepare.bad_records import BadRecord, get_column
from penstock.prepare.formats.conversation import Conversation
from penstock.prepare.formats.messages import (
    OPENAI,
    MessageKeys,
    Turn,
    build_conversation,
    get_text_or_default,
    is_trained,
    list_entries,
    normalize_role,
    parse_message,
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
SHAREGPT = MessageKeys("from", "value", ROLES)
MIXED = MessageKeys("role", "content", ROLES)

CALL_ROLES = ("function_call", "tool_call", "tool_calls")
"""Speakers whose words are calls of tools, as JSON."""


def sharegpt(settings: DatasetSettings, record: Mapping[str, Any]) -> Conversation:
    """The turns in `field_messages`, or `conversations`; a system prompt in `field_system`."""
    name = settings.field_messages or "conversations"
    turns = parse_mixed_messages(name, get_column(record, name))
    return build_conversation(
        settings, record, turns, get_text_or_default(record, settings.field_system, "system")
    )


def parse_mixed_messages(where: str, value: Any) -> list[Turn]:
    """The messages in a list of them, each spelled in either way."""
    turns: list[Turn] = []
    for index, entry in list_entries(where, value):
        turn = parse_mixed_message(f"{where}[{index}]", entry)
        if turns and _is_continuation(turns[-1], turn):
            turns[-1] = _merge_calls(turns[-1], turn)
        else:
            turns.append(turn)
    return turns


def parse_mixed_message(where: str, value: Any) -> Turn:
    """A message, spelled in either way."""
    if not isinstance(value, dict):
        return parse_message(where, value, SHAREGPT)
    spelling = SHAREGPT if "from" in value or "role" not in value else MIXED
    said = value.get(spelling.role)
    if not isinstance(said, str) or normalize_role(said) not in CALL_ROLES:
        return parse_message(where, value, spelling)
    if spelling.content not in value:
        names = ", ".join(value)
        raise BadRecord("missing_column", f"{where} has no {spelling.content}; it has {names}")
    calls = parse_inline_calls(f"{where}.{spelling.content}", value[spelling.content])
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    return Turn(message, is_trained(where, value.get("weight")))


def _is_continuation(before: Turn, turn: Turn) -> bool:
    """Whether `turn` is nothing but calls, and the assistant has just spoken alike."""
    return (
        set(turn.message) == {"role", "content", "tool_calls"}
        and turn.message["content"] is None
        and before.is_answer
        and before.trained == turn.trained
    )


def _merge_calls(before: Turn, turn: Turn) -> Turn:
    calls = [*before.message.get("tool_calls", ()), *turn.message["tool_calls"]]
    return replace(before, message={**before.message, "tool_calls": calls})
