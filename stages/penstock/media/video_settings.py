"""The settings of transformers' video processors of Qwen's models: which frames are used, and how
large they become. The processors themselves need torchvision, and are not called."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from penstock.core.errors import CapabilityError, ConfigError
from penstock.media.bounds import UNBOUNDED, MediaBounds
from penstock.media.video import BadVideo, VideoHeader

CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

MAX_ASPECT = 200  # Of the sides of a frame

BILINEAR, BICUBIC = 2, 3  # Values of `resample` (Pillow's) that are supported

# Where the frames per second of a list of frames are not known, as in transformers.
DEFAULT_FPS = 24.0


@dataclass(frozen=True)
class VideoSettings:
    """Settings of a video processor, by the names of its configuration file."""

    video_processor_type: str
    size: Mapping[str, int]
    """`shortest_edge` and `longest_edge`: fewest and most pixels, of a frame or of the video."""
    patch_size: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    max_video_tokens: int
    do_sample_frames: bool
    fps: float | None
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_frames: int = 4
    max_frames: int = 768
    num_frames: int | None = None
    do_resize: bool = True
    resample: int = BICUBIC
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    cap_pixels_per_frame: bool | None = None

    @property
    def factor(self) -> int:
        """Pixels along a side of what becomes a token."""
        return self.patch_size * self.merge_size

    def sample(self, header: VideoHeader) -> list[int]:
        """Indices of the frames that are used. Raises BadVideo."""
        if header.is_sampled or not self.do_sample_frames:
            return [*range(header.frames)]
        if self.num_frames is None and self.fps is not None and not header.fps:
            raise BadVideo("its frames per second are not known, by which frames are sampled")
        return KINDS[self.video_processor_type].sample(self, header)

    def resized(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of this many frames after resizing. Raises BadVideo."""
        if not self.do_resize:
            if height % self.factor or width % self.factor:
                raise BadVideo(
                    f"its {width} x {height} pixels are no multiples of {self.factor}, and the "
                    "video processor does not resize (do_resize)"
                )
            return height, width
        return KINDS[self.video_processor_type].resized(self, frames, height, width)


def read_video_settings(
    name: str, values: Mapping[str, Any], bounds: MediaBounds = UNBOUNDED
) -> VideoSettings:
    """The settings in the file of a video processor of class `name`, but for `bounds`.

    Raises CapabilityError for other video processors and for settings that are not supported,
    ConfigError for values that exclude each other.
    """
    if name not in KINDS:
        raise CapabilityError(
            f"The video processor {name} is not supported (it needs torchvision); supported are "
            f"{', '.join(KINDS)}."
        )
    values = {**values, **_as_settings(bounds)}
    names = {field.name for field in fields(VideoSettings)} - {"video_processor_type"}
    values_by_name = {
        key: value
        for key, value in values.items()
        if key in names and (value is not None or key == "fps")
    }
    if name == "Qwen2VLVideoProcessor":
        values_by_name["size"] = {**(values_by_name.get("size") or KINDS[name].defaults["size"])}
        for edge, own in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
            if values.get(own) is not None:
                values_by_name["size"][edge] = values[own]
    video = VideoSettings(name, **{**KINDS[name].defaults, **values_by_name})
    if not (video.size.get("shortest_edge") and video.size.get("longest_edge")):
        raise CapabilityError(
            f"size of the video processor is {dict(video.size)}; shortest_edge and longest_edge are"
            " supported."
        )
    if not (video.do_rescale and video.do_normalize):
        raise CapabilityError("Video processors without do_rescale and do_normalize are refused.")
    if video.resample not in (BILINEAR, BICUBIC):
        raise CapabilityError(
            f"resample of the video processor is {video.resample}; {BICUBIC} (bicubic) and"
            f" {BILINEAR} (bilinear) are supported."
        )
    if video.do_sample_frames and video.fps is not None and video.num_frames is not None:
        raise ConfigError(
            f"fps {video.fps} and num_frames {video.num_frames} of the video processor exclude each"
            " other.\n  Leave one of them out of its file."
        )
    _require_bounds(video, bounds)
    return video


def _as_settings(bounds: MediaBounds) -> dict[str, Any]:
    own = {name.removeprefix("video_"): value for name, value in bounds.of("video").items()}
    return {**own, "do_sample_frames": True, "num_frames": None} if "fps" in own else own


def _require_bounds(video: VideoSettings, bounds: MediaBounds) -> None:
    own = [name for name in bounds.of("video") if name != "video_fps"]
    samples = video.do_sample_frames and video.fps is not None and video.num_frames is None
    if own and not samples:
        raise ConfigError(
            f"{' and '.join(own)}: the video processor {video.video_processor_type} does not "
            "sample frames by their number per second.\n  Write video_fps too."
        )
    if own and video.min_frames > video.max_frames:
        raise ConfigError(
            f"{' and '.join(own)}: videos have from {video.min_frames} to {video.max_frames} frames"
            " then.\n  Write both video_min_frames and video_max_frames."
        )


def _sample_in_patches(settings: VideoSettings, header: VideoHeader) -> list[int]:
    """Qwen2-VL: evenly spaced frames, a whole number of temporal patches."""
    import torch  # noqa: PLC0415 - its arange rounds as transformers'

    step, total = settings.temporal_patch_size, header.frames
    if settings.num_frames is not None:
        count = round(settings.num_frames / step) * step
    elif settings.fps is not None and header.fps:
        most = min(settings.max_frames, total) // step * step
        count_by_fps = max(total / header.fps * settings.fps, settings.min_frames)
        count = math.floor(min(count_by_fps, most) / step) * step
    else:
        return [*range(total)]
    if count > total:
        raise BadVideo(f"it has {total} frames, and the video processor takes {count}")
    if not count:
        raise BadVideo(f"it has {total} frames, fewer than a temporal patch of {step}")
    return torch.arange(0, total, total / count).int().tolist()


def _sample_ends(settings: VideoSettings, header: VideoHeader) -> list[int]:
    """Qwen3-VL: evenly spaced frames with the first and the last."""
    total = header.frames
    if settings.num_frames is not None:
        count = settings.num_frames
    elif settings.fps is not None and header.fps:
        count_by_fps = int(total / header.fps * settings.fps)
        count = min(max(count_by_fps, settings.min_frames), settings.max_frames, total)
    else:
        count = min(max(total, settings.min_frames), settings.max_frames)
    return np.linspace(0, total - 1, count).round().astype(int).tolist()


def _size_of_frame(
    settings: VideoSettings, frames: int, height: int, width: int
) -> tuple[int, int]:
    """Qwen2-VL: `size` is of a frame."""
    least, most = settings.size["shortest_edge"], settings.size["longest_edge"]
    if settings.cap_pixels_per_frame:
        budget = int(settings.max_video_tokens * settings.factor * settings.factor * 0.9)
        share = budget * settings.temporal_patch_size // frames
        most = max(min(most, share), int(least * 1.05))
    return _fit((height, width), settings.factor, (least, most))


def _size_of_video(
    settings: VideoSettings, frames: int, height: int, width: int
) -> tuple[int, int]:
    """Qwen3-VL: `size` is of all frames together."""
    least, most = settings.size["shortest_edge"], settings.size["longest_edge"]
    if settings.cap_pixels_per_frame:
        cap = settings.max_video_tokens * settings.factor * settings.factor
        most = frames * max(min(cap, most // frames), int(least * 1.05))
    step = settings.temporal_patch_size
    if frames < step:
        raise BadVideo(f"it has {frames} frames, fewer than a temporal patch of {step}")
    if min(height, width) < settings.factor:
        scale = max(settings.factor / height, settings.factor / width)
        height, width = int(height * scale), int(width * scale)
    patches = round(frames / step) * step
    return _fit((height, width), settings.factor, (least, most), frames, patches)


def _fit(
    sides: tuple[int, int],
    factor: int,
    limits: tuple[int, int],
    frames: int = 1,
    rounded_frames: int = 1,
) -> tuple[int, int]:
    """The sides as multiples of `factor`, with the fewest and most pixels of all frames."""
    if max(sides) / min(sides) > MAX_ASPECT:
        raise BadVideo(
            f"the longer side of its {sides[1]} x {sides[0]} pixels is more than {MAX_ASPECT} times"
            " the other"
        )
    least, most = limits
    height, width = (round(length / factor) * factor for length in sides)
    pixels = frames * sides[0] * sides[1]
    if rounded_frames * height * width > most:
        shrink = math.sqrt(pixels / most)
        height, width = (
            max(factor, math.floor(length / shrink / factor) * factor) for length in sides
        )
    elif rounded_frames * height * width < least:
        grow = math.sqrt(least / pixels)
        height, width = (math.ceil(length * grow / factor) * factor for length in sides)
    return height, width


@dataclass(frozen=True)
class _Kind:
    """What differs between video processors."""

    defaults: Mapping[str, Any]
    sample: Callable[[VideoSettings, VideoHeader], list[int]]
    resized: Callable[[VideoSettings, int, int, int], tuple[int, int]]


KINDS: Mapping[str, _Kind] = {
    "Qwen2VLVideoProcessor": _Kind(
        {
            "size": {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2},
            "patch_size": 14,
            "image_mean": CLIP[0],
            "image_std": CLIP[1],
            "max_video_tokens": 128_000,
            "do_sample_frames": False,
            "fps": None,
        },
        _sample_in_patches,
        _size_of_frame,
    ),
    "Qwen3VLVideoProcessor": _Kind(
        {
            "size": {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2},
            "patch_size": 16,
            "image_mean": HALF[0],
            "image_std": HALF[1],
            "max_video_tokens": 768,
            "do_sample_frames": True,
            "fps": 2.0,
        },
        _sample_ends,
        _size_of_video,
    ),
}
"""By the class of transformers; the defaults are its own."""
