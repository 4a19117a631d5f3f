"""A prepared sample in parts that are printed, and its words."""

import re
from dataclasses import dataclass

REPEATED = re.compile(r"(<[^<>]{1,40}>)\1{3,}")
"""A special token four times or more."""

_CONTROL_CHARS = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: chr(0x2421),
    **{code: f"<U+{code:04X}>" for code in (*range(0x80, 0xA0), *range(0x202A, 0x202F))},
    **{code: f"<U+{code:04X}>" for code in range(0x2066, 0x206A)},
}
"""Replacements of control and bidirectional characters, which a terminal would execute."""


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one style."""

    trained: bool
    special: bool
    text: str
    input_ids: list[int]


@dataclass(frozen=True)
class Part:
    """A whole sample, or the prompt or a completion of a preference pair."""

    name: str
    tokens: int
    trained_tokens: int
    other_targets: int
    """Trained positions whose label differs from the token at that position."""
    spans: list[Span]


@dataclass(frozen=True)
class ImageView:
    """An image, audio or video of a sample."""

    digest: str
    """SHA-256 of its encoded bytes."""
    width: int
    height: int
    """Pixels, before processing; of audio, samples and their rate."""
    tokens: int
    kind: str = "image"
    frames: int | None = None
    """Of a video, those that are used."""


@dataclass(frozen=True)
class SampleView:
    """One sample, ready to be printed."""

    index: int
    source: str
    section: str
    """The config field of the source."""
    slice: str
    record: int
    """The index of the record in its slice, from 0."""
    file: str | None
    line: int | None
    """Its line or row in the file, from 1; None if the source cannot be read."""
    desirable: bool | None
    score_gap: float | None
    parts: list[Part]
    images: list[ImageView]


def format_origin(shown: SampleView) -> str:
    """Its source, and its file and line."""
    location = f"{shown.file}:{shown.line}"
    if shown.line is None:
        location = f"record {shown.record} of slice {shown.slice}"
    return f"{shown.source} ({shown.section}), {location}"


def format_counts(shown: SampleView, part: Part) -> str:
    """The tokens of a part, and what is judged of it."""
    judged = {True: "desirable, ", False: "undesirable, ", None: ""}[shown.desirable]
    name = "" if part.name == "sample" else f"{part.name}, "
    if part.name == "chosen" and shown.score_gap is not None:
        name += f"scored {shown.score_gap:g} higher, "
    text = f"{name}{judged}{part.tokens} tokens, {part.trained_tokens} trained"
    if part.other_targets:
        text += f"; {part.other_targets} labels are other tokens than those shown"
    return text


def format_image(number: int, image: ImageView) -> str:
    """The digest, size and tokens of an image, audio or video."""
    size = f"{image.width} x {image.height} pixels"
    if image.kind == "audio":
        size = f"{image.width / max(image.height, 1):.2f} s at {image.height} Hz"
    if image.frames is not None:
        size = f"{image.frames} frames of {size}"
    return f"{image.kind} {number}: {image.digest[:16]}, {size}, {image.tokens} tokens"


def printable(span: Span) -> str:
    """Its text; of a special token that is repeated, as those of images are, the number."""
    text = span.text
    if span.special:
        text = REPEATED.sub(lambda match: f"{match[1]} x {len(match[0]) // len(match[1])}", text)
    return _escape_control_chars(text)


def _escape_control_chars(text: str) -> str:
    return text.translate(_CONTROL_CHARS)
