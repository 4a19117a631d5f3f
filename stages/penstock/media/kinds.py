"""The kinds of media in data, and how records name them."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

MAX_BYTES = 128 << 20  # Maximum size of an encoded image, or of audio


class BadMedia(Exception):  # noqa: N818 - caught where the record is known
    """An image, audio or video cannot be used; the message says why, as part of a sentence."""


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


AUDIO_EXTRA = "audio"  # The extra of this package that decodes and resamples audio

AUDIO_SUFFIXES = (".aif", ".aiff", ".au", ".caf", ".flac", ".mp3", ".oga", ".ogg", ".opus", ".w64")
"""Suffixes of files that need this extra."""

VIDEO_EXTRA = "video"  # The extra of this package that decodes files of video

VIDEO_SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm")
"""Suffixes of files that need this extra."""

EXTRAS: Mapping[str, tuple[str, ...]] = {
    AUDIO_EXTRA: ("soundfile", "soxr"),
    VIDEO_EXTRA: ("av",),
}
"""Modules of this package's extras that media need."""


def has_extra(extra: str) -> bool:
    """Whether the modules of an extra are there."""
    return all(find_spec(module) is not None for module in EXTRAS[extra])


@dataclass(frozen=True)
class DecodedBy:
    """What decodes some files of a kind."""

    extra: str
    suffixes: tuple[str, ...]
    otherwise: str  # What to do without it


DECODED_BY: Mapping[str, DecodedBy] = {
    "audio": DecodedBy(
        AUDIO_EXTRA,
        AUDIO_SUFFIXES,
        "save the audio as WAV files at the rate of the model's processor",
    ),
    "video": DecodedBy(VIDEO_EXTRA, VIDEO_SUFFIXES, "give videos as lists of frames"),
}
"""By kind."""


class MissingPackages(BadMedia):
    """Media cannot be used as packages are not installed."""

    def __init__(self, why: str, extra: str) -> None:
        """`why`: part of a sentence; `extra`: that of this package which has them."""
        super().__init__(f"{why}: pip install 'penstock[{extra}]'")
        self.extra = extra


@dataclass(frozen=True)
class MediaKind:
    """A kind of media."""

    name: str  # Type of the parts of a message, and the member with its reference
    article: str  # Its name in messages: one of it
    plural: str
    parts: tuple[str, ...]  # Types of parts of a message in data
    columns: tuple[str, ...]  # Columns with those of a record
    max_bytes: int = MAX_BYTES  # Maximum size of an encoded one

    @property
    def sources(self) -> tuple[str, ...]:
        """Members of a part, or of an object in a column, that say where it is."""
        return (*self.parts, "url", "path", "bytes", "base64")

    @property
    def placeholder(self) -> str:
        return f"<{self.name}>"


IMAGE = MediaKind(
    "image", "an image", "images", ("image", "image_url", "input_image"), ("images", "image")
)
AUDIO = MediaKind(
    "audio", "audio", "audio", ("audio", "audio_url", "input_audio"), ("audios", "audio")
)
VIDEO = MediaKind(
    "video",
    "a video",
    "videos",
    ("video", "video_url", "input_video"),
    ("videos", "video"),
    max_bytes=512 << 20,
)

KINDS: Mapping[str, MediaKind] = {kind.name: kind for kind in (IMAGE, AUDIO, VIDEO)}  # By name

# Every record with media has one of these as a column, a member or the type of a part.
WORDS = tuple(keyword for kind in KINDS.values() for keyword in (*kind.parts, *kind.columns))
