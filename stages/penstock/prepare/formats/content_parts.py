"""Contents that are lists of parts: text, reasoning, tool calls, a tool result, media."""

from collections.abc import Mapping
from typing import Any

from penstock.media.kinds import KINDS
from penstock.prepare.bad_records import BadRecord, check_text, wrong_type
from penstock.prepare.formats.conversation import REASONING, Message
from penstock.prepare.formats.images import media_part, text_part
from penstock.prepare.formats.json_values import to_json_text
from penstock.prepare.formats.tool_calls import parse_inline_calls
from penstock.prepare.formats.training_flags import FLAGS

TEXT, REASON, CALL, RESULT, MEDIA = "text", "reasoning", "tool_call", "tool", "media"
PARTS: Mapping[str, str] = {
    **dict.fromkeys(("text", "input_text", "output_text"), TEXT),
    **dict.fromkeys(REASONING, REASON),
    **dict.fromkeys(("tool_call", "tool_calls", "function_call"), CALL),
    **dict.fromkeys(("tool", "tool_result", "tool_response"), RESULT),
    **{part: name for name, kind in KINDS.items() for part in kind.parts},
}
"""Types of content parts: text, reasoning, tool calls, a tool result, or a kind of media."""


class Parts(list[Message]):
    """Content that is parts, because it has media."""


def merge_parts(location: str, value: Message, role: str, name: str) -> Message:
    """Merge a content that is a list of parts into text, reasoning and tool call fields."""
    content = value.get(name)
    if not isinstance(content, list) or (role == "tool" and not _is_part_list(content)):
        return value
    path = f"{location}.{name}"
    by_kind: dict[str, list[Any]] = {TEXT: [], REASON: [], CALL: [], RESULT: [], MEDIA: []}
    parts = Parts()
    for index, part in enumerate(content):
        kind, inside = _parse_part(f"{path}[{index}]", part)
        flag = next((flag for flag in FLAGS if part.get(flag) is not None), None)
        if flag and role == "assistant":
            why = f"{path}[{index}] has {flag}, but a message is trained whole or not at all"
            raise BadRecord("bad_value", f"{why}; write it beside {name}")
        if kind == RESULT and role != "tool":
            why = f"{path}[{index}] is a tool's answer in a message of {role}"
            raise BadRecord("bad_value", why)
        if kind == MEDIA and role == "assistant":
            article = KINDS[inside[0]["type"]].article
            raise BadRecord("bad_value", f"{path}[{index}] is {article}, which no answer can hold")
        by_kind[kind] += inside
        if kind in (TEXT, RESULT, MEDIA):
            parts += inside if kind == MEDIA else map(text_part, inside)
    if by_kind[CALL] and value.get("tool_calls"):
        raise BadRecord("bad_value", f"{location} has both tool_calls and parts of type tool_call")
    if by_kind[REASON] and any(value.get(note) for note in REASONING):
        why = f"{location} has its reasoning both in a part and beside content"
        raise BadRecord("bad_value", why)
    text = "".join(by_kind[TEXT] + by_kind[RESULT])
    members: Message = {**value, name: parts if by_kind[MEDIA] else text}
    if by_kind[REASON]:
        members[REASONING[0]] = "".join(by_kind[REASON])
    if by_kind[CALL]:
        members["tool_calls"] = by_kind[CALL]
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
    # Not the first that is there: in columnar files, parts have the fields of all others, as null.
    names = (str(part["type"]), "text", "value", "content")
    return next((part[name] for name in names if part.get(name) is not None), None)


def _parse_part(location: str, part: Any) -> tuple[str, list[Any]]:
    """(type of a part, its texts or tool calls)."""
    if not isinstance(part, dict) or "type" not in part:
        raise wrong_type(location, part, "a part of a message")
    kind = PARTS.get(str(part["type"]))
    if kind is None:
        part_types = ", ".join(dict.fromkeys(PARTS.values()))
        why = f"{location} is of type {str(part['type'])[:40]!r}; only text and media can be used"
        raise BadRecord("bad_value", f"{why}, in parts of type {part_types}")
    if kind in KINDS:
        return MEDIA, [media_part(location, KINDS[kind], part)]
    inside = _part_value(part)
    if inside is None:
        names = ", ".join(part)
        raise BadRecord("missing_column", f"{location} has no text and no value; it has {names}")
    if kind == CALL:
        return kind, parse_inline_calls(location, inside)
    if kind == RESULT and not isinstance(inside, str):
        return kind, [to_json_text(location, inside)]
    return kind, [check_text(location, inside)]
