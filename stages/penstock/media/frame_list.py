"""A video that is given as images: its frames in one piece of bytes, by which it is identified."""

import json
from dataclasses import dataclass
from itertools import accumulate, pairwise

MAGIC = b"\0penstock frames\n"  # Begins no file of images or video


@dataclass(frozen=True)
class FrameList:
    """The frames of a video, as encoded images."""

    contents: tuple[bytes, ...]
    fps: float | None  # Frames per second; None: unknown


def join_frames(contents: list[bytes], fps: float | None) -> bytes:
    """The frames in one piece."""
    head = json.dumps({"fps": fps, "sizes": [len(content) for content in contents]})
    return b"".join([MAGIC, head.encode(), b"\n", *contents])


def split_frames(content: bytes) -> FrameList | None:
    """The frames that were joined; None for other content."""
    if not content.startswith(MAGIC):
        return None
    start = content.index(b"\n", len(MAGIC)) + 1
    head = json.loads(content[len(MAGIC) : start])
    ends = accumulate(head["sizes"], initial=start)
    return FrameList(tuple(content[a:b] for a, b in pairwise(ends)), head["fps"])
