"""ERNIEKit's data with images: texts that are masked (the user's) or not, each with its images."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from penstock.media.kinds import IMAGE
from penstock.prepare.bad_records import (
    BadRecord,
    check_text,
    describe_value,
    get_column,
    wrong_type,
)
from penstock.prepare.formats.conversation import Conversation, Message
from penstock.prepare.formats.images import media_part, text_part
from penstock.prepare.formats.messages import Turn, build_conversation, get_text_or_default
from penstock.prepare.settings import DatasetSettings

TEXTS, IMAGES, VIDEOS = "text_info", "image_info", "video_info"
INDEX = "matched_text_index"
ROLES = {"mask": "user", "no_mask": "assistant"}
"""Roles by the `tag` of a text."""

UNREAD = ("tool_response", "tool_calls")


def text_info(settings: DatasetSettings, record: Mapping[str, Any]) -> Conversation:
    """Parse a conversation. Texts of the same tag in a row are one message."""
    if record.get(VIDEOS):
        raise BadRecord("bad_value", f"it has {VIDEOS}; only text and images can be used")
    texts = _objects(TEXTS, get_column(record, TEXTS))
    if not texts:
        raise BadRecord("empty", f"{TEXTS} is empty")
    parts = _images_before(record, len(texts))
    roles: list[str] = []
    for index, entry in enumerate(texts):
        location = f"{TEXTS}[{index}]"
        if unread := [name for name in UNREAD if entry.get(name)]:
            raise BadRecord("bad_value", f"{location} has {unread[0]}, which is not read")
        role = ROLES.get(str(entry.get("tag")))
        if role is None:
            raise BadRecord("bad_value", f"{location}.tag is not {' or '.join(ROLES)}")
        if role == "assistant" and parts[index]:
            raise BadRecord("bad_value", f"{location} has an image, which no answer can hold")
        parts[index].append(text_part(check_text(f"{location}.text", entry.get("text"))))
        roles.append(role)
    turns: list[Turn] = []
    for role, group in groupby(range(len(texts)), key=lambda index: roles[index]):
        group_parts = [part for index in group for part in parts[index]]
        has_images = any(part["type"] != "text" for part in group_parts)
        content: Any = group_parts if has_images else "".join(part["text"] for part in group_parts)
        turns.append(Turn({"role": role, "content": content}, 1.0))
    system = get_text_or_default(record, settings.field_system, "system")
    return build_conversation(settings, record, turns, system)


def _images_before(record: Mapping[str, Any], count: int) -> list[list[Message]]:
    image_parts: list[list[Message]] = [[] for _ in range(count)]
    for number, entry in enumerate(_objects(IMAGES, record.get(IMAGES) or [])):
        index = entry.get(INDEX, 0)
        if not isinstance(index, int) or not 0 <= index < count:
            why = f"{IMAGES}[{number}].{INDEX} is {describe_value(index)}; there are {count} texts"
            raise BadRecord("bad_value", why)
        location = f"{IMAGES}[{number}]"
        if not isinstance(entry.get("image_url"), str):
            raise BadRecord("missing_column", f"{location} has no image_url")
        image_parts[index].append(media_part(location, IMAGE, {"image_url": entry["image_url"]}))
    return image_parts


def _objects(name: str, value: Any) -> list[Message]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise wrong_type(name, value, "a list of objects")
    return value
