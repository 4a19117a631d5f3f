"""The kinds of media in data, and how records name them."""

from collections.abc import Mapping
from dataclasses import dataclass


class BadMedia(Exception):  # noqa: N818 - caught where the record is known
    """An image or audio cannot be used; the message says why, as part of a sentence."""


@dataclass(frozen=True)
class MediaKind:
    """A kind of media."""

    name: str
    """Type of the parts of a message, and the member with its reference."""
    article: str
    """Its name in messages: one of it."""
    plural: str
    parts: tuple[str, ...]
    """Types of parts of a message in data."""
    columns: tuple[str, ...]
    """Columns with those of a record."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Members of a part, or of an object in a column, that say where it is."""
        return (*self.parts, "url", "path", "bytes", "base64")

    @property
    def placeholder(self) -> str:
        """What stands for one of a column in the texts of messages."""
        return f"<{self.name}>"


IMAGE = MediaKind(
    "image", "an image", "images", ("image", "image_url", "input_image"), ("images", "image")
)
AUDIO = MediaKind(
    "audio", "audio", "audio", ("audio", "audio_url", "input_audio"), ("audios", "audio")
)
VIDEO = MediaKind(
    "video", "a video", "videos", ("video", "video_url", "input_video"), ("videos", "video")
)
"""Not read: records with videos are refused. The processors of transformers need torchvision."""

READ = (IMAGE, AUDIO)
"""The kinds that are read."""

KINDS: Mapping[str, MediaKind] = {kind.name: kind for kind in (*READ, VIDEO)}
"""By name."""

WORDS = tuple(word for kind in READ for word in (*kind.parts, *kind.columns))
"""Every record with media has one of these as a column, a member or the type of a part."""
