"""`sharegpt`: messages with `from` and `value`; tool calls and results are separate messages.

OpenAI messages may occur among them. A tool call after assistant text or another call is merged
into the same message, as models generate them.
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
"""Roles whose content is tool calls, as JSON."""


def sharegpt(settings: DatasetSettings, record: Mapping[str, Any]) -> Conversation:
    """Parse `field_messages`, or `conversations`; the system prompt is in `field_system`."""
    name = settings.field_messages or "conversations"
    turns = parse_mixed_messages(name, get_column(record, name))
    return build_conversation(
        settings, record, turns, get_text_or_default(record, settings.field_system, "system")
    )


def parse_mixed_messages(where: str, value: Any) -> list[Turn]:
    """Parse a list of messages in ShareGPT or OpenAI format."""
    turns: list[Turn] = []
    for index, entry in list_entries(where, value):
        turn = parse_mixed_message(f"{where}[{index}]", entry)
        if turns and _is_continuation(turns[-1], turn):
            turns[-1] = _merge_calls(turns[-1], turn)
        else:
            turns.append(turn)
    return turns


def parse_mixed_message(where: str, value: Any) -> Turn:
    """Parse a message in ShareGPT or OpenAI format."""
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
    """Whether `turn` has only tool calls and follows an assistant message that is trained alike."""
    return (
        set(turn.message) == {"role", "content", "tool_calls"}
        and turn.message["content"] is None
        and before.is_answer
        and before.trained == turn.trained
    )


def _merge_calls(before: Turn, turn: Turn) -> Turn:
    calls = [*before.message.get("tool_calls", ()), *turn.message["tool_calls"]]
    return replace(before, message={**before.message, "tool_calls": calls})
