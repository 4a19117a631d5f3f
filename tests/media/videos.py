"""Videos and video processors, made in code, and the cases of `tests/golden/videos.json`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.media.video import VideoHeader
from penstock.media.video_processor import VideoProcessor, load_video_processor
from penstock.rows.tokenizer import load_tokenizer
from tests.media.tiny_processors import CHATML, write_processor

Frames = npt.NDArray[np.uint8]

VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
TEXT_PART = "{%- elif c.type == 'text' -%}"
TEMPLATE = CHATML.replace(TEXT_PART, "{%- elif c.type == 'video' -%}" + VIDEO + TEXT_PART).replace(
    "IMAGE", VIDEO.replace("video", "image")
)
TYPES = {"qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}


@dataclass(frozen=True)
class Case:
    """A video, and settings of a video processor."""

    family: str
    frames: int
    height: int
    width: int
    fps: float | None
    settings: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def pixels(self) -> Frames:
        """Its frames, [frames, height, width, 3]: noise of blocks and single pixels."""
        generator = np.random.default_rng(self.frames)
        shape = self.frames, self.height // 8 + 1, self.width // 8 + 1, 3
        blocks = generator.integers(0, 200, shape).repeat(8, 1).repeat(8, 2)
        noise = generator.integers(0, 56, (self.frames, self.height, self.width, 3))
        return (blocks[:, : self.height, : self.width] + noise).astype(np.uint8)


SMALL = {"size": {"shortest_edge": 4 * 28**2, "longest_edge": 12 * 28**2}}
WHOLE = {"size": {"shortest_edge": 4 * 32**2, "longest_edge": 60 * 32**2}}
EVENLY = {"do_sample_frames": True}
CASES = {
    "qwen2, all frames": Case("qwen2_5_vl", 8, 60, 90, 12.5, SMALL),
    "qwen2, an odd number": Case("qwen2_5_vl", 7, 200, 133, 25.0, SMALL),
    "qwen2, by fps": Case("qwen2_5_vl", 37, 40, 70, 12.5, {**SMALL, **EVENLY, "fps": 2.0}),
    "qwen2, by number": Case("qwen2_5_vl", 23, 56, 56, 30.0, {**SMALL, **EVENLY, "num_frames": 6}),
    "qwen2, at most": Case(
        "qwen2_5_vl", 31, 50, 60, 10.0, {**SMALL, **EVENLY, "fps": 5.0, "max_frames": 9}
    ),
    "qwen2, capped": Case(
        *("qwen2_5_vl", 12, 120, 90, 12.5),
        {**SMALL, "cap_pixels_per_frame": True, "max_video_tokens": 40},
    ),
    "qwen2, pixels": Case(
        "qwen2_5_vl", 4, 90, 300, 24.0, {"min_pixels": 56**2, "max_pixels": 112**2}
    ),
    "qwen2, list of frames": Case("qwen2_5_vl", 5, 60, 44, None, SMALL),
    "qwen2, bilinear": Case("qwen2_5_vl", 4, 100, 75, 12.5, {**SMALL, "resample": 2}),
    "qwen3, by fps": Case("qwen3_vl", 61, 70, 100, 24.0, WHOLE),
    "qwen3, by number": Case("qwen3_vl", 23, 64, 64, 30.0, {**WHOLE, "num_frames": 5, "fps": None}),
    "qwen3, short": Case("qwen3_vl", 3, 50, 80, 10.0, WHOLE),
    "qwen3, small": Case("qwen3_vl", 9, 20, 50, 12.0, WHOLE),
    "qwen3, capped": Case(
        *("qwen3_vl", 30, 120, 150, 10.0),
        {**WHOLE, "cap_pixels_per_frame": True, "max_video_tokens": 4},
    ),
    "qwen3, large": Case("qwen3_vl", 12, 150, 210, 3.0, WHOLE),
    "qwen3, list of frames": Case(
        "qwen3_vl", 6, 64, 48, None, {**WHOLE, "do_sample_frames": False}
    ),
}

SAMPLE = {family: Case(family, 6, 60, 90, 4.0, SMALL) for family in TYPES}
"""The video of `sample`, whose frames are given."""


def sample(video: Any, image: Any) -> list[dict[str, Any]]:
    """A conversation about a video and an image."""
    parts = [
        {"type": "text", "text": "What of "},
        {"type": "video", "video": video, "fps": 4.0},
        {"type": "image", "image": image},
        {"type": "text", "text": "?"},
    ]
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": "A cat."}]


@dataclass(frozen=True)
class ArrayVideo:
    """A video that needs no decoding."""

    pixels: Frames
    fps: float | None

    @property
    def header(self) -> VideoHeader:
        frames, height, width, _ = self.pixels.shape
        return VideoHeader(frames, self.fps, width, height, is_sampled=self.fps is None)

    def read(self, indices: Sequence[int]) -> Iterator[Frames]:
        yield from self.pixels[list(indices)]


def write_video_processor(folder: Path, family: str, **settings: Any) -> Path:
    """The tokenizer, chat template and processor files of a tiny model that takes videos."""
    write_processor(family, folder, TEMPLATE)
    config = {"video_processor_type": TYPES[family], **settings}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(config))
    return folder


def load_processor(folder: Path) -> VideoProcessor:
    """The video processor in a folder that has one."""
    found = load_video_processor(str(folder), None, load_tokenizer(str(folder)))
    assert found is not None
    return found


def video_file(
    frames: Frames, fps: int = 10, kind: str = "mp4", codec: str = "mpeg4", **options: Any
) -> bytes:
    """A file of these frames, encoded by PyAV."""
    import av

    stream = BytesIO()
    with av.open(stream, "w", format=kind, options=options) as file:
        video = file.add_stream(codec, rate=Fraction(fps))
        assert isinstance(video, av.VideoStream)
        video.height, video.width, video.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in frames:
            file.mux(video.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(video.encode())
    return stream.getvalue()
