"""Images, audio and videos of records: parts of messages, and columns that replace `<image>`,
`<audio>` and `<video>` in texts.

A message with media has a list of parts as its content: `{"type": "text", "text": …}` and
`{"type": KIND, KIND: ImageRef}`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.media.kinds import IMAGE, KINDS, VIDEO, BadMedia, MediaKind
from penstock.media.reference import ImageRef, from_base64
from penstock.prepare.bad_records import BadRecord, check_text, wrong_type
from penstock.prepare.formats.conversation import Message

NO_SOURCE = ImageRef()
"""The media of a part that names none: the next one in the record's column."""

COLUMNS = frozenset(name for kind in KINDS.values() for name in kind.columns)

BASE64 = ("base64", "data")
"""Members with base64; OpenAI's `input_audio` has it in `data`."""

FPS = "fps"
"""Member with the frames per second of a list of frames."""

# Members of a video by which other libraries choose and resize its frames.
SAMPLED = (
    *("nframes", "num_frames", "min_frames", "max_frames", "sample_fps", "raw_fps"),
    *("video_start", "video_end", "total_pixels", "min_pixels", "max_pixels"),
    *("resized_height", "resized_width"),
)


def media_part(location: str, kind: MediaKind, part: Mapping[str, Any]) -> Message:
    """The part of a message that is an image, audio or video. Raises BadRecord if it cannot be read
    as one."""
    names = (*kind.sources, FPS, *SAMPLED) if kind == VIDEO else kind.sources
    present = [name for name in names if part.get(name) is not None]
    if not present:
        return {"type": kind.name, kind.name: NO_SOURCE}
    ref = _parse(location, kind, {name: part[name] for name in present})
    return {"type": kind.name, kind.name: ref}


def text_part(text: str) -> Message:
    """The part of a message that is text."""
    return {"type": "text", "text": text}


def place_media(
    record: Mapping[str, Any], messages: Sequence[Message]
) -> tuple[list[Message], dict[str, int]]:
    """(messages with the media of the record's columns, number of media of each kind that have no
    place).

    Each image takes the place of the next part without a source, or of the next `<image>` in the
    texts of messages that the assistant did not write; so does audio.

    Raises BadRecord if there are more places than media, or fewer.
    """
    placed, unplaced = list(messages), dict[str, int]()
    has_parts = any(isinstance(message["content"], list) for message in messages)
    if not has_parts and COLUMNS.isdisjoint(record):
        return placed, unplaced
    for kind in KINDS.values():
        placed, count = _place(kind, record, placed)
        if count:
            unplaced[kind.name] = count
    return placed, unplaced


def _place(
    kind: MediaKind, record: Mapping[str, Any], messages: list[Message]
) -> tuple[list[Message], int]:
    missing = sum(
        part.get(kind.name) is NO_SOURCE
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
    )
    column_values = _column_values(kind, record)
    if not column_values and not missing:
        return messages, 0
    num_placeholders = missing or sum(_count_placeholders(kind, message) for message in messages)
    if not num_placeholders:
        return messages, len(column_values)
    refs = [_parse(location, kind, value) for location, value in column_values]
    if num_placeholders != len(refs):
        expected = f"parts of type {kind.name} without a source" if missing else kind.placeholder
        raise BadRecord(
            "bad_value",
            f"it has {len(refs)} {kind.plural} ({' or '.join(kind.columns)}) and "
            f"{num_placeholders} {expected}",
        )
    ahead = iter(refs)
    fill = _fill_parts if missing else _fill_text
    return [fill(kind, message, ahead) for message in messages], 0


def _column_values(kind: MediaKind, record: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(place, value) of the media in the record's column."""
    for name in kind.columns:
        value = record.get(name)
        if value is None or value in ("", []):
            continue
        several = value if isinstance(value, list) else [value]
        return [(f"{name}[{index}]", entry) for index, entry in enumerate(several)]
    return []


def _parse(location: str, kind: MediaKind, value: Any) -> ImageRef:
    """An image, audio or video: a path, URL or data URI; bytes; or an object with one of its
    sources. A video may be a list of images."""
    if isinstance(value, list) and kind == VIDEO:
        if not value:
            raise BadRecord("empty", f"{location} has no frames")
        frames = [_parse(f"{location}[{index}]", IMAGE, frame) for index, frame in enumerate(value)]
        return ImageRef(kind=VIDEO.name, frames=tuple(frames))
    if isinstance(value, bytes):
        return ImageRef(content=value, kind=kind.name)
    if isinstance(value, str):
        return ImageRef(check_text(location, value), kind=kind.name)
    if not isinstance(value, Mapping):
        raise wrong_type(location, value, kind.article)
    if kind == VIDEO and (value.get(FPS) is not None or any(name in value for name in SAMPLED)):
        return _parse_sampled(location, value)
    source_names = (*kind.sources, BASE64[-1])
    present = {name: value[name] for name in source_names if value.get(name) is not None}
    # Hugging Face's Image and Audio features have the bytes, and the path that they had.
    name = "bytes" if "bytes" in present else next(iter(present), None)
    if name is None:
        raise BadRecord("missing_column", f"{location} has none of {', '.join(kind.sources)}")
    if name in BASE64:
        try:
            return from_base64(check_text(f"{location}.{name}", present[name]), kind.name)
        except BadMedia as error:
            raise BadRecord("bad_value", f"{location}.{name}: {error}") from error
    if name == "bytes" and isinstance(present[name], str):
        raise BadRecord("wrong_type", f"{location}.bytes is a string; write it as base64")
    return _parse(f"{location}.{name}", kind, present[name])


def _parse_sampled(location: str, value: Mapping[str, Any]) -> ImageRef:
    if unread := [name for name in SAMPLED if value.get(name) is not None]:
        raise BadRecord(
            "bad_value",
            f"{location} has {unread[0]}, which is not read: the model's video processor says "
            "which frames are used, and how large",
        )
    fps = value.get(FPS)
    ref = _parse(location, VIDEO, {n: v for n, v in value.items() if n not in (FPS, *SAMPLED)})
    if fps is None:
        return ref
    if not ref.frames:
        raise BadRecord(
            "bad_value",
            f"{location} has fps, which is that of a list of frames; of a file, the model's video "
            "processor says which frames are used",
        )
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise BadRecord("bad_value", f"{location}.fps is {fps!r} where a positive number is meant")
    return replace(ref, fps=float(fps))


def _count_placeholders(kind: MediaKind, message: Message) -> int:
    if message["role"] == "assistant":
        return 0
    content = message["content"]
    if isinstance(content, str):
        return content.count(kind.placeholder)
    texts = (part["text"] for part in content or () if part["type"] == "text")
    return sum(text.count(kind.placeholder) for text in texts)


def _fill_parts(kind: MediaKind, message: Message, ahead: Iterator[ImageRef]) -> Message:
    if not isinstance(message["content"], list):
        return message
    parts = [
        {**part, kind.name: next(ahead)} if part.get(kind.name) is NO_SOURCE else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _fill_text(kind: MediaKind, message: Message, ahead: Iterator[ImageRef]) -> Message:
    if not _count_placeholders(kind, message):
        return message
    content = message["content"]
    parts: list[Message] = []
    for part in [text_part(content)] if isinstance(content, str) else content:
        if part["type"] != "text":
            parts.append(part)
            continue
        for number, text in enumerate(part["text"].split(kind.placeholder)):
            if number:
                parts.append({"type": kind.name, kind.name: next(ahead)})
            if text:
                parts.append(text_part(text))
    return {**message, "content": parts}
