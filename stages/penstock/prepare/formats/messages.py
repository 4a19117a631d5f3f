"""Parse messages in OpenAI's chat format: role, content, tool calls and tool results.

Other fields of a message are kept if they are text or JSON, because chat templates read some of
them (`name`, `tool_call_id`, `reasoning_content`). Nulls are dropped, because columnar files fill
absent fields with nulls.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Any

from penstock.prepare.bad_records import (
    BadRecord,
    check_list,
    check_text,
    describe_value,
    get_optional_text,
    wrong_type,
)
from penstock.prepare.formats.content_parts import Parts, merge_parts
from penstock.prepare.formats.conversation import REASONING, Conversation, Message
from penstock.prepare.formats.images import place_media
from penstock.prepare.formats.json_values import (
    check_json,
    parse_json_text,
    require_object,
    to_json_text,
)
from penstock.prepare.formats.message_keys import CALL, MessageKeys
from penstock.prepare.formats.tool_calls import (
    parse_inline_calls,
    parse_tool_call,
    parse_tool_calls,
    parse_tools,
)
from penstock.prepare.formats.training_detail import Ranges, trained_ranges
from penstock.prepare.formats.training_flags import message_weight
from penstock.prepare.settings import DatasetSettings

OTHER_MEDIA = ("images", "image", "audio", "audios", "video", "videos")
"""Message fields with media, which are parts of `content` where they are read."""

TOOLS, FUNCTIONS = "tools", "functions"

READ_FIELDS = frozenset(("tool_calls", "function_call"))
"""Message fields that are parsed separately, besides role, content and flags."""


@dataclass(slots=True)
class Turn:
    """A message and its loss weight if its role is trained; 0 if it is excluded."""

    message: Message
    weight: float = 0.0
    ranges: Ranges | None = None
    """The characters of its content that are trained; None: all."""

    @property
    def trained(self) -> bool:
        """Whether it is trained."""
        return self.weight > 0

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


def build_conversation(
    settings: DatasetSettings,
    record: Mapping[str, Any],
    turns: Sequence[Turn],
    system: str | None = None,
) -> Conversation:
    """Build a conversation from `turns`, the tools in `field_tools`, and a system prompt.

    The system prompt is `system`, or the text in `field_system`, unless the turns start with one.
    With `drop_system_message` it has neither.
    """
    first = get_optional_text(record, settings.field_system) if system is None else system
    if settings.drop_system_message:
        turns = list(dropwhile(lambda turn: turn.message["role"] == "system", turns))
        if not turns:
            raise BadRecord("empty", "it has nothing but a system prompt")
    elif first and turns[0].message["role"] != "system":
        turns = [text_turn("system", first), *turns]
    messages, unplaced = place_media(record, [turn.message for turn in turns])
    ranges = {i: turn.ranges for i, turn in enumerate(turns) if turn.ranges is not None}
    tools = settings.field_tools
    if tools == TOOLS and not record.get(tools) and FUNCTIONS in record:
        tools = FUNCTIONS  # an older name of it
    trained_roles = settings.roles_to_train
    weights = tuple(t.weight if t.message["role"] in trained_roles else 0.0 for t in turns)
    tool_definitions = parse_tools(tools, record.get(tools))
    return Conversation(messages, tool_definitions, weights, unplaced, ranges=ranges)


def get_text_or_default(record: Mapping[str, Any], name: str | None, usual: str) -> str:
    """The text in column `name`, or in the default column `usual`; empty if that is missing."""
    return get_optional_text(record, name or (usual if usual in record else None))


def parse_messages(location: str, value: Any, keys: MessageKeys) -> list[Turn]:
    """Parse a list of messages."""
    turns: list[Turn] = []
    for index, entry in enumerate(_list_entries(location, value)):
        turn = parse_message(f"{location}[{index}]", entry, keys)
        if keys.merges_calls and turns and _is_continuation(turns[-1], turn):
            before = turns[-1].message
            calls = [*before.get("tool_calls", ()), *turn.message["tool_calls"]]
            turns[-1] = replace(turns[-1], message={**before, "tool_calls": calls})
        else:
            turns.append(turn)
    return turns


_EXAMPLE = '[{"role": "user", "content": "…"}, …]'


def _list_entries(location: str, value: Any) -> list[Any]:
    is_blank = isinstance(value, str) and not value.strip()
    if isinstance(value, str) and not is_blank and value.lstrip()[0] not in "[{":
        why = f"{location} is text where a list of messages is meant, such as {_EXAMPLE}"
        raise BadRecord("wrong_type", why)
    entries = [] if is_blank else parse_json_text(location, value)
    if not check_list(location, entries, "a list of messages"):
        raise BadRecord("empty", f"{location} is empty")
    return entries


def parse_message(location: str, value: Any, keys: MessageKeys) -> Turn:
    """Parse one message."""
    if plain := _parse_plain(location, value, keys):
        return plain
    value = require_object(location, value)
    role_key, content_key = keys.of(value)
    role = _parse_role(location, value, role_key, keys.roles)
    if role == CALL:
        content = _require_key(location, value, content_key)
        calls = parse_inline_calls(f"{location}.{content_key}", content)
        message: Message = {"role": "assistant", "content": None, "tool_calls": calls}
        message.update(_parse_other_fields(location, value, keys))
        return Turn(message, *_trained_part(location, value, keys, "assistant", None))
    value = merge_parts(location, value, role, content_key)
    message = {"role": role, "content": None}
    calls = _parse_calls(location, value, role)
    if calls:
        message["tool_calls"] = calls
    message["content"] = _parse_content(location, value, role, content_key, may_lack=bool(calls))
    if len(value) > 2:
        message.update(_parse_other_fields(location, value, keys))
    return Turn(message, *_trained_part(location, value, keys, role, message["content"]))


def _trained_part(
    location: str, value: Message, keys: MessageKeys, role: str, content: Any
) -> tuple[float, Ranges | None]:
    """(loss weight, trained ranges of the content) of a message."""
    weight = message_weight(location, value, keys.flags, role, keys.trained_roles)
    if keys.detail is None or value.get(keys.detail) is None:
        return weight, None
    return trained_ranges(
        f"{location}.{keys.detail}",
        value[keys.detail],
        content,
        weight,
        is_flagged=any(value.get(flag) is not None for flag in keys.flags),
        is_role=role in keys.trained_roles,
    )


def _parse_plain(location: str, value: Any, keys: MessageKeys) -> Turn | None:
    """A message that is nothing but a role and text; None for any other."""
    if not isinstance(value, dict) or len(value) != 2 or not keys.flags.keys().isdisjoint(value):
        return None
    role_key, content_key = keys.spellings[0]
    name, content = value.get(role_key), value.get(content_key)
    if not (isinstance(name, str) and isinstance(content, str)):
        return None
    role = keys.roles.get(name, CALL)
    if role == CALL:
        return None
    if not content.isascii():
        check_text(f"{location}.{content_key}", content)
    weight = 1.0 if role in keys.trained_roles else 0.0
    return Turn({"role": role, "content": content}, weight)


def text_turn(role: str, text: str) -> Turn:
    """A message with checked text only."""
    return Turn({"role": role, "content": text}, 1.0)


def _require_key(location: str, value: Message, key: str) -> Any:
    if key not in value:
        raise BadRecord("missing_column", f"{location} has no {key}; it has {', '.join(value)}")
    return value[key]


def _parse_role(location: str, value: Message, key: str, roles: Mapping[str, str]) -> str:
    name = check_text(f"{location}.{key}", _require_key(location, value, key))
    role = roles.get(name) or roles.get(name.strip().lower().replace("-", "_"))
    if role:
        return role
    near = difflib.get_close_matches(name, list(roles), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(roles)}"
    raise BadRecord("bad_value", f"{location}.{key} is {name[:40]!r}{hint}")


def _is_continuation(before: Turn, turn: Turn) -> bool:
    """Whether `turn` has only tool calls and follows an assistant message that is trained alike."""
    return (
        set(turn.message) == {"role", "content", "tool_calls"}
        and turn.message["content"] is None
        and before.is_answer
        # A message has one loss weight.
        and before.weight == turn.weight
        and before.ranges == turn.ranges
    )


def _parse_calls(location: str, value: Message, role: str) -> list[Message]:
    calls, legacy = value.get("tool_calls"), value.get("function_call")
    if not calls and not legacy:
        return []
    if role != "assistant":
        name = "tool_calls" if calls else "function_call"
        raise BadRecord("bad_value", f"{location} has {name}, but only the assistant calls tools")
    if calls and legacy:
        raise BadRecord("bad_value", f"{location} has both tool_calls and function_call")
    if calls:
        return parse_tool_calls(f"{location}.tool_calls", calls)
    return [parse_tool_call(f"{location}.function_call", legacy)]


def _parse_content(
    location: str, value: Message, role: str, name: str, *, may_lack: bool
) -> str | Parts | None:
    content = value.get(name)
    path = f"{location}.{name}"
    if isinstance(content, str):
        return check_text(path, content)
    if isinstance(content, Parts):
        return content
    if content is None and may_lack:
        return None
    _require_key(location, value, name)
    if role == "tool" and content is not None:
        return to_json_text(path, content)
    raise wrong_type(path, content, "a string")


def _parse_other_fields(location: str, value: Message, keys: MessageKeys) -> Message:
    role_key, content_key = keys.of(value)
    read = {role_key, content_key, *READ_FIELDS, *keys.flags, keys.detail}
    fields: Message = {}
    for name, entry in value.items():
        if entry is None or name in read:
            continue
        if name in OTHER_MEDIA:
            if entry:
                why = f"{location} has {name}; only text can be trained on"
                raise BadRecord("bad_value", f"{why}, and media that are parts of content")
            continue
        fields[name] = check_json(f"{location}.{name}", entry)
    notes = [name for name in REASONING if name in fields]
    for name in notes:
        check_text(f"{location}.{name}", fields[name])
    if len({fields[name] for name in notes}) > 1:
        raise BadRecord("bad_value", f"{location} has {' and '.join(notes)}, which differ")
    for name in ("role", "content"):
        if name in fields:
            raise BadRecord("bad_value", f"{location} has both {name} and {role_key}")
    return fields


def parse_labels(location: str, value: Any, count: int, why: str) -> list[bool]:
    """Parse a list of `count` labels; `why` explains the count in the error.

    Raises BadRecord for another length and for entries other than 0 and 1.
    """
    if not isinstance(value, list) or len(value) != count:
        shown = describe_value(value)
        raise BadRecord(
            "bad_value", f"{location} is {shown} where a list of {count} is meant, {why}"
        )
    for index, label in enumerate(value):
        if not isinstance(label, int) or label not in (0, 1):
            element = f"{location}[{index}]"
            raise BadRecord(
                "bad_value", f"{element} is {describe_value(label)} where 0 or 1 is meant"
            )
    return [bool(label) for label in value]
