"""Decode video: files by PyAV, and lists of frames, to RGB frames. Container, size and length are
read from the header, before anything is decoded."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.media.decode import BadImage, decode, read_header, require_pillow
from penstock.media.frame_list import MAGIC, FrameList, split_frames
from penstock.media.kinds import (
    VIDEO,
    VIDEO_EXTRA,
    BadMedia,
    MissingPackages,
    first_line,
    has_extra,
)

MAX_SECONDS = 3_600  # Maximum length of a video

MAX_FRAME_PIXELS = 8192 * 4320  # Maximum pixels of a frame

# Maximum pixels of all frames of a file together: more than an hour of 1920 x 1080 at 60 frames per
# second.
MAX_DECODED_PIXELS = 1 << 39

# FFmpeg's demuxers that are used: none of them opens other files.
CONTAINERS = {"mov": "MP4 or QuickTime", "matroska": "WebM or Matroska", "avi": "AVI"}

IMAGE_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")
"""Brands of images in the container of MP4."""

Frame = npt.NDArray[np.uint8]  # RGB pixels [height, width, 3]


class BadVideo(BadMedia):
    """The video cannot be used."""


@dataclass(frozen=True)
class VideoHeader:
    """What is known of a video before it is decoded."""

    frames: int
    fps: float | None  # Frames per second; None: unknown
    width: int
    height: int
    is_sampled: bool = False  # Whether its frames are those that are used, as in a list of frames


class Video(Protocol):
    """A video whose header was read."""

    @property
    def header(self) -> VideoHeader:
        """Its size and length."""
        ...

    def read(self, indices: Sequence[int]) -> Iterator[Frame]:
        """The frames at these indices, which do not decrease. Raises BadVideo."""
        ...


def require_packages(content: bytes) -> None:
    """Raise MissingPackages without those that decode this video: lists of frames need none."""
    if not content.startswith(MAGIC) and not has_extra(VIDEO_EXTRA):
        raise MissingPackages("files of video need a further package", VIDEO_EXTRA)


def open_video(content: bytes) -> Video:
    """Read the header of a video. Raises BadVideo for what is none, or too large, and
    MissingPackages as `require_packages`."""
    require_packages(content)
    if not content:
        raise BadVideo("it is empty")
    if len(content) > VIDEO.max_bytes:
        raise BadVideo(f"it has {len(content):,} bytes; {VIDEO.max_bytes:,} are allowed")
    try:
        frames = split_frames(content)
    except (ValueError, KeyError, TypeError) as error:
        raise BadVideo("it is a damaged list of frames") from error
    video = _open_frames(frames) if frames else _open_file(content)
    _check_size(video.header)
    return video


def _check_size(header: VideoHeader) -> None:
    if not header.frames:
        raise BadVideo("it has no frames")
    pixels = header.width * header.height
    if not pixels:
        raise BadVideo("it is damaged: its frames have no pixels")
    if pixels > MAX_FRAME_PIXELS:
        size = f"{header.width:,} x {header.height:,} pixels"
        raise BadVideo(f"its frames have {size}; {MAX_FRAME_PIXELS:,} together are allowed")
    seconds = header.frames / header.fps if header.fps else 0
    if seconds > MAX_SECONDS:
        raise BadVideo(f"it is {seconds:,.0f} s long; {MAX_SECONDS:,} are allowed")
    if pixels * header.frames > MAX_DECODED_PIXELS:
        raise BadVideo(
            f"its {header.frames:,} frames have {pixels * header.frames:,} pixels; "
            f"{MAX_DECODED_PIXELS:,} are allowed"
        )


@dataclass(frozen=True)
class FrameVideo:
    """A list of frames, all of which are used."""

    frames: FrameList
    header: VideoHeader

    def read(self, indices: Sequence[int]) -> Iterator[Frame]:
        for index in indices:
            try:
                frame = np.asarray(decode(self.frames.contents[index]))
            except BadImage as error:
                raise BadVideo(f"frame {index + 1}: {error}") from error
            if frame.shape[:2] != (self.header.height, self.header.width):
                raise BadVideo(
                    f"frame {index + 1} has {frame.shape[1]} x {frame.shape[0]} pixels, and the "
                    f"first {self.header.width} x {self.header.height}"
                )
            yield frame


def _open_frames(frames: FrameList) -> FrameVideo:
    require_pillow()
    if not frames.contents:
        raise BadVideo("it has no frames")
    try:
        first = decode(frames.contents[0])  # its size is known once it is rotated
        for content in frames.contents[1:]:
            read_header(content)
    except BadImage as error:
        raise BadVideo(f"one of its frames cannot be used: {error}") from error
    size = VideoHeader(len(frames.contents), frames.fps, *first.size, is_sampled=True)
    return FrameVideo(frames, size)


@dataclass(frozen=True)
class FileVideo:
    """The first video stream of a file."""

    content: bytes
    container: str
    header: VideoHeader

    def read(self, indices: Sequence[int]) -> Iterator[Frame]:
        counts = Counter(indices)
        frames_left = len(counts)
        with _stream(self.content, self.container) as (file, stream):
            # From the start: a seek leads to key frames only, and not exactly in every container.
            for number, frame in enumerate(file.decode(stream)):
                if number in counts:
                    array = _to_rgb(frame)
                    if array.shape[:2] != (self.header.height, self.header.width):
                        raise BadVideo("its frames have several sizes, which is not supported")
                    frames_left -= 1
                    for _ in range(counts[number]):
                        yield array
                if not frames_left:
                    return
        raise BadVideo(
            f"it is damaged: {frames_left} of the {len(counts)} frames that are used are missing"
        )


def _open_file(content: bytes) -> FileVideo:
    container = _container(content)
    with _stream(content, container) as (file, stream):
        rate = stream.average_rate
        size = int(stream.width), int(stream.height)
        # Of WebM, the header does not say it.
        count = stream.frames or sum(1 for packet in file.demux(stream) if packet.size)
    return FileVideo(content, container, VideoHeader(count, float(rate) if rate else None, *size))


@contextmanager
def _stream(content: bytes, container: str) -> Iterator[tuple[Any, Any]]:
    """(the file, its first video stream). Raises BadVideo, also for errors within."""
    import av  # noqa: PLC0415 - optional

    try:
        # The format is named, since FFmpeg's own choice may be a playlist, which names other files
        # and URLs.
        with av.open(BytesIO(content), format=container) as file:
            if not file.streams.video:
                raise BadVideo("it has no video stream")
            stream = file.streams.video[0]
            if stream.codec_context is None:
                raise BadVideo("its codec is not known to this FFmpeg")
            yield file, stream
    except (av.FFmpegError, EOFError, ValueError, OSError, MemoryError) as error:
        raise BadVideo(f"it is damaged: {first_line(error)}") from error


def _to_rgb(frame: Any) -> Frame:
    if getattr(frame, "rotation", 0):
        raise BadVideo(
            f"its frames are to be rotated by {frame.rotation}°, which is not supported; encode it "
            "again (ffmpeg -i IN OUT.mp4)"
        )
    return frame.to_ndarray(format="rgb24")


def _container(content: bytes) -> str:
    """FFmpeg's name of the container. Raises BadVideo for other content."""
    if content.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    if content.startswith(b"RIFF") and content[8:12] == b"AVI ":
        return "avi"
    is_movie = content[4:8] in (b"ftyp", b"moov", b"mdat", b"wide")
    if is_movie and content[8:12] not in IMAGE_BRANDS:
        return "mov"
    containers = ", ".join(CONTAINERS.values())
    if content.startswith((b"GIF8", b"\x89PNG", b"\xff\xd8")) or content[8:12] == b"WEBP":
        raise BadVideo(f"it is an image, not a video ({containers}); give its frames as a list")
    raise BadVideo(f"it is not a video that can be decoded (known are {containers})")
