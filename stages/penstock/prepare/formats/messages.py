"""Parse messages in OpenAI's chat format: role, content, tool calls and tool results.

Other fields of a message are kept if they are text or JSON, because chat templates read some of
them (`name`, `tool_call_id`, `reasoning_content`). Nulls are dropped, because columnar files fill
absent fields with nulls.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.media.kinds import KINDS
from penstock.prepare.bad_records import (
    BadRecord,
    check_text,
    describe_value,
    get_column,
    get_optional_text,
    json_type_name,
)
from penstock.prepare.formats.conversation import REASONING, Conversation, Message
from penstock.prepare.formats.images import media_part, place_media, text_part
from penstock.prepare.formats.json_values import check_json, parse_json_text, to_json_text
from penstock.prepare.formats.tool_calls import (
    parse_inline_calls,
    parse_tool_call,
    parse_tool_calls,
    parse_tools,
)
from penstock.prepare.settings import DatasetSettings

OTHER_MEDIA = ("images", "image", "audio", "audios", "video", "videos")
"""Message fields with media, which are parts of `content` where they are read."""

READ_FIELDS = frozenset(("tool_calls", "function_call", "weight"))
"""Message fields that are parsed separately, besides role and content."""

TEXT, REASON, CALL, RESULT, MEDIA = "text", "reasoning", "tool_call", "tool", "media"
PARTS: Mapping[str, str] = {
    **dict.fromkeys(("text", "input_text", "output_text"), TEXT),
    **dict.fromkeys(REASONING, REASON),
    **dict.fromkeys(("tool_call", "tool_calls", "function_call"), CALL),
    **dict.fromkeys(("tool", "tool_result", "tool_response"), RESULT),
    **{part: name for name, kind in KINDS.items() for part in kind.parts},
}
"""Types of content parts: text, reasoning, tool calls, a tool result, or a kind of media."""


@dataclass(frozen=True)
class MessageKeys:
    """Names of a message's role and content fields, and its role names."""

    role: str
    content: str
    roles: Mapping[str, str]


OPENAI = MessageKeys(
    "role",
    "content",
    {
        "system": "system",
        "developer": "system",
        "user": "user",
        "assistant": "assistant",
        "tool": "tool",
        "function": "tool",
        "ipython": "tool",
    },
)
"""`developer` is a newer name of `system`; `function` and `ipython` are older names of `tool`. Most
chat templates do not know them and silently skip such messages."""


@dataclass(frozen=True)
class Turn:
    """A message and whether it may be trained."""

    message: Message
    trained: bool

    @property
    def is_answer(self) -> bool:
        """Whether it is an assistant message."""
        return self.message["role"] == "assistant"

    @property
    def is_blank(self) -> bool:
        """Whether it has neither text nor tool calls."""
        content = self.message["content"]
        is_empty = not (content.strip() if isinstance(content, str) else content)
        return "tool_calls" not in self.message and is_empty


class _Parts(list[Message]):
    """Content that is parts, because it has media."""


def conversation(settings: DatasetSettings, record: Mapping[str, Any]) -> Conversation:
    """Parse `field_messages`, or `messages`. Raises BadRecord if they cannot be used."""
    name = settings.field_messages or "messages"
    turns = parse_messages(name, get_column(record, name))
    labels = record.get(settings.field_label)
    return build_conversation(settings, record, _apply_labels(settings.field_label, labels, turns))


def build_conversation(
    settings: DatasetSettings,
    record: Mapping[str, Any],
    turns: Sequence[Turn],
    system: str | None = None,
) -> Conversation:
    """Build a conversation from `turns`, the tools in `field_tools`, and a system prompt.

    The system prompt is `system`, or the text in `field_system`, unless the turns start with one.
    """
    first = get_optional_text(record, settings.field_system) if system is None else system
    if first and turns[0].message["role"] != "system":
        turns = [Turn({"role": "system", "content": first}, trained=False), *turns]
    messages, unplaced = place_media(record, [turn.message for turn in turns])
    return Conversation(
        messages,
        parse_tools(settings.field_tools, record.get(settings.field_tools)),
        tuple(turn.trained for turn in turns),
        unplaced,
    )


def get_text_or_default(record: Mapping[str, Any], name: str | None, usual: str) -> str:
    """The text in column `name`, or in the default column `usual`; empty if that is missing."""
    return get_optional_text(record, name or (usual if usual in record else None))


def parse_messages(where: str, value: Any) -> list[Turn]:
    """Parse a list of messages."""
    return [
        parse_message(f"{where}[{index}]", entry) for index, entry in list_entries(where, value)
    ]


_EXAMPLE = '[{"role": "user", "content": "…"}, …]'


def list_entries(where: str, value: Any) -> list[tuple[int, Any]]:
    """Enumerate a list of messages, which may be JSON text."""
    is_blank = isinstance(value, str) and not value.strip()
    if isinstance(value, str) and not is_blank and value.lstrip()[0] not in "[{":
        raise BadRecord(
            "wrong_type",
            f"{where} is text where a list of messages is meant, such as {_EXAMPLE}",
        )
    found = [] if is_blank else parse_json_text(where, value)
    if not isinstance(found, list):
        raise BadRecord(
            "wrong_type", f"{where} is {json_type_name(found)} where a list of messages is meant"
        )
    if not found:
        raise BadRecord("empty", f"{where} is empty")
    return list(enumerate(found))


def parse_message(where: str, value: Any, spelling: MessageKeys = OPENAI) -> Turn:
    """Parse one message."""
    if not isinstance(value, dict):
        raise BadRecord(
            "wrong_type", f"{where} is {json_type_name(value)} where an object is meant"
        )
    role = _parse_role(where, value, spelling)
    value = _merge_parts(where, value, role, spelling.content)
    message: Message = {"role": role, "content": None}
    calls = _parse_calls(where, value, role)
    if calls:
        message["tool_calls"] = calls
    message["content"] = _parse_content(where, value, role, spelling.content, may_lack=bool(calls))
    if len(value) > 2:
        message.update(_parse_other_fields(where, value, spelling))
    return Turn(message, role == "assistant" and is_trained(where, value.get("weight")))


def text_turn(role: str, text: str) -> Turn:
    """A message with checked text only; trained if it is the assistant's."""
    return Turn({"role": role, "content": text}, trained=role == "assistant")


def is_trained(where: str, weight: Any) -> bool:
    """Parse a message's weight, 0 or 1; a missing weight is 1."""
    if weight is None:
        return True
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise BadRecord("wrong_type", f"{where}.weight is {json_type_name(weight)}; write 0 or 1")
    if weight not in (0, 1):
        raise BadRecord(
            "bad_value",
            f"{where}.weight is {weight}; write 0 or 1, since a label is trained or it is not and "
            "holds no fraction",
        )
    return weight == 1


def normalize_role(said: str) -> str:
    """Normalize the spelling of a role."""
    return said.strip().lower().replace("-", "_")


def _apply_labels(where: str, value: Any, turns: list[Turn]) -> list[Turn]:
    """Mark assistant messages with label 0 as untrained.

    Labels are a list, possibly as JSON text; a label column with other values is unrelated.
    """
    is_text = isinstance(value, str) and value.lstrip().startswith("[")
    found = parse_json_text(where, value) if is_text else value
    if not isinstance(found, list):
        return turns
    count = sum(turn.is_answer for turn in turns)
    labels = iter(parse_labels(where, found, count, "one for each message of the assistant's"))
    return [
        replace(turn, trained=next(labels) and turn.trained) if turn.is_answer else turn
        for turn in turns
    ]


def _parse_role(where: str, value: Message, spelling: MessageKeys) -> str:
    if spelling.role not in value:
        raise BadRecord(
            "missing_column", f"{where} has no {spelling.role}; it has {', '.join(value)}"
        )
    said = check_text(f"{where}.{spelling.role}", value[spelling.role])
    role = spelling.roles.get(said) or spelling.roles.get(normalize_role(said))
    if role:
        return role
    near = difflib.get_close_matches(said, list(spelling.roles), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(spelling.roles)}"
    raise BadRecord("bad_value", f"{where}.{spelling.role} is {said[:40]!r}{hint}")


def _parse_calls(where: str, value: Message, role: str) -> list[Message]:
    calls, legacy = value.get("tool_calls"), value.get("function_call")
    if not calls and not legacy:
        return []
    if role != "assistant":
        name = "tool_calls" if calls else "function_call"
        raise BadRecord("bad_value", f"{where} has {name}, but only the assistant calls tools")
    if calls and legacy:
        raise BadRecord("bad_value", f"{where} has both tool_calls and function_call")
    if calls:
        return parse_tool_calls(f"{where}.tool_calls", calls)
    return [parse_tool_call(f"{where}.function_call", legacy)]


def _parse_content(
    where: str, value: Message, role: str, name: str, *, may_lack: bool
) -> str | _Parts | None:
    content = value.get(name)
    at = f"{where}.{name}"
    if isinstance(content, str):
        return check_text(at, content)
    if isinstance(content, _Parts):
        return content
    if content is None and may_lack:
        return None
    if name not in value:
        raise BadRecord("missing_column", f"{where} has no {name}; it has {', '.join(value)}")
    if role == "tool" and content is not None:
        return to_json_text(at, content)
    raise BadRecord("wrong_type", f"{at} is {json_type_name(content)} where a string is meant")


def _merge_parts(where: str, value: Message, role: str, name: str) -> Message:
    """Merge a content that is a list of parts into text, reasoning and tool call fields."""
    content = value.get(name)
    at = f"{where}.{name}"
    if not isinstance(content, list) or (role == "tool" and not _is_part_list(content)):
        return value
    found: dict[str, list[Any]] = {TEXT: [], REASON: [], CALL: [], RESULT: [], MEDIA: []}
    parts = _Parts()
    for index, part in enumerate(content):
        kind, inside = _parse_part(f"{at}[{index}]", part)
        if kind == RESULT and role != "tool":
            raise BadRecord("bad_value", f"{at}[{index}] is a tool's answer in a message of {role}")
        if kind == MEDIA and role == "assistant":
            what = KINDS[inside[0]["type"]].article
            raise BadRecord("bad_value", f"{at}[{index}] is {what}, which no answer can hold")
        found[kind] += inside
        if kind in (TEXT, RESULT, MEDIA):
            parts += inside if kind == MEDIA else map(text_part, inside)
    if found[CALL] and value.get("tool_calls"):
        raise BadRecord("bad_value", f"{where} has both tool_calls and parts of type tool_call")
    if found[REASON] and any(value.get(note) for note in REASONING):
        raise BadRecord("bad_value", f"{where} has its reasoning both in a part and beside content")
    text = "".join(found[TEXT] + found[RESULT])
    members: Message = {**value, name: parts if found[MEDIA] else text}
    if found[REASON]:
        members[REASONING[0]] = "".join(found[REASON])
    if found[CALL]:
        members["tool_calls"] = found[CALL]
        members[name] = members[name] or None
    return members


def _is_part_list(content: list[Any]) -> bool:
    """Whether a list consists of content parts, rather than being a JSON result of a tool."""
    return bool(content) and all(
        isinstance(part, dict)
        and PARTS.get(str(part.get("type"))) not in (None, *KINDS)
        and _part_value(part) is not None
        for part in content
    )


def _part_value(part: Message) -> Any:
    """The value of a part, in the field named as its type, `text`, `value` or `content`."""
    names = (str(part["type"]), "text", "value", "content")
    return next((part[name] for name in names if part.get(name) is not None), None)


def _parse_part(where: str, part: Any) -> tuple[str, list[Any]]:
    """(type of a part, its texts or tool calls)."""
    if not isinstance(part, dict) or "type" not in part:
        raise BadRecord(
            "wrong_type", f"{where} is {json_type_name(part)} where a part of a message is meant"
        )
    kind = PARTS.get(str(part["type"]))
    if kind is None:
        known = ", ".join(dict.fromkeys(PARTS.values()))
        why = f"{where} is of type {str(part['type'])[:40]!r}"
        raise BadRecord(
            "bad_value", f"{why}; only text and media can be used, in parts of type {known}"
        )
    if kind in KINDS:
        return MEDIA, [media_part(where, KINDS[kind], part)]
    inside = _part_value(part)
    if inside is None:
        names = ", ".join(part)
        raise BadRecord("missing_column", f"{where} has no text and no value; it has {names}")
    if kind == CALL:
        return kind, parse_inline_calls(where, inside)
    if kind == RESULT and not isinstance(inside, str):
        return kind, [to_json_text(where, inside)]
    return kind, [check_text(where, inside)]


def _parse_other_fields(where: str, value: Message, spelling: MessageKeys) -> Message:
    kept: Message = {}
    for name, entry in value.items():
        if entry is None or name in READ_FIELDS or name in (spelling.role, spelling.content):
            continue
        if name in OTHER_MEDIA:
            if entry:
                raise BadRecord(
                    "bad_value",
                    f"{where} has {name}; only text can be trained on, and media that are parts of "
                    "content",
                )
            continue
        kept[name] = check_json(f"{where}.{name}", entry)
    notes = [name for name in REASONING if name in kept]
    for name in notes:
        check_text(f"{where}.{name}", kept[name])
    if len({kept[name] for name in notes}) > 1:
        raise BadRecord("bad_value", f"{where} has {' and '.join(notes)}, which differ")
    for name in ("role", "content"):
        if name in kept:
            raise BadRecord("bad_value", f"{where} has both {name} and {spelling.role}")
    return kept


def parse_labels(where: str, value: Any, count: int, why: str) -> list[bool]:
    """Parse a list of `count` labels; `why` explains the count in the error.

    Raises BadRecord for another length and for entries other than 0 and 1.
    """
    if not isinstance(value, list) or len(value) != count:
        raise BadRecord(
            "bad_value",
            f"{where} is {describe_value(value)} where a list of {count} is meant, {why}",
        )
    for index, label in enumerate(value):
        if not isinstance(label, int) or label not in (0, 1):
            raise BadRecord(
                "bad_value", f"{where}[{index}] is {describe_value(label)} where 0 or 1 is meant"
            )
    return [bool(label) for label in value]
