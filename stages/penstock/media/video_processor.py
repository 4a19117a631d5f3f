"""The video processor of a model: a video to patches, and to the text that stands for it.

Bitwise that of transformers (on the CPU), without torchvision. Each video is processed alone, frame
by frame, so that memory holds the frames that are used after they were resized.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from penstock.core.errors import ConfigError
from penstock.media.bounds import UNBOUNDED, MediaBounds
from penstock.media.kinds import VIDEO, first_line
from penstock.media.model_processor import (
    IMAGE_PROCESSOR,
    PROCESSOR,
    ModelProcessor,
    ProcessorFiles,
    Tensors,
    build_processor,
    processor_class,
)
from penstock.media.video import BadVideo, Frame, Video, open_video, require_packages
from penstock.media.video_settings import (
    BICUBIC,
    DEFAULT_FPS,
    VideoSettings,
    read_video_settings,
)
from penstock.rows.pixel_table import PixelTable, StoredTensor, stored

FORMAT = 1  # Increase it if the same settings must give other tensors

VIDEO_PROCESSOR = "video_preprocessor_config.json"

# Names of the patches and of their grid: those of images, because the vision tower computes videos
# and images alike.
PIXELS, GRID = "pixel_values", "image_grid_thw"

SECONDS = "second_per_grid_ts"  # Seconds of a temporal patch

INDICES, FPS = "frames_indices", "fps"
"""What the text needs to know: the frames that are used, and frames per second of all."""

MAX_PIXELS = 1 << 27  # Maximum pixels of all frames that are used, after resizing


@dataclass(frozen=True)
class VideoProcessor(ModelProcessor):
    """A video processor and the parts of its processor that concern text."""

    video_settings: VideoSettings = field(kw_only=True)

    kind = VIDEO

    @cached_property
    def unused(self) -> frozenset[str]:
        return frozenset({INDICES, FPS})

    @property
    def settings(self) -> dict[str, Any]:
        return {"format": FORMAT, "settings": vars(self.video_settings)}

    @cached_property
    def table(self) -> PixelTable:
        """The values of the 256 bytes: rescaled and normalized at once, as in transformers."""
        scale = np.float32(1.0 / self.video_settings.rescale_factor)
        mean, std = (
            (np.asarray(constants, np.float32) * scale)[:, None]
            for constants in (self.video_settings.image_mean, self.video_settings.image_std)
        )
        return PixelTable((np.arange(256, dtype=np.float32) - mean) / std)

    def require_packages(self, content: bytes) -> None:
        require_packages(content)

    def _process_file(self, digest: bytes, content: bytes) -> tuple[Tensors, tuple[int, int]]:
        del digest
        video = open_video(content)
        return self.process(video), (video.header.width, video.header.height)

    def process(self, video: Video) -> Tensors:
        header = video.header
        indices = self.video_settings.sample(header)
        size = self.video_settings.resized(len(indices), header.height, header.width)
        pixels = len(indices) * size[0] * size[1]
        if pixels > MAX_PIXELS:
            raise BadVideo(
                f"{len(indices)} frames of {size[1]} x {size[0]} pixels are {pixels:,}; "
                f"{MAX_PIXELS:,} are allowed: sample fewer frames (video_fps, video_max_frames of "
                "the data set), or smaller ones (size in the video processor's file)"
            )
        step = self.video_settings.temporal_patch_size
        # Rounded up to whole temporal patches.
        num_frames = len(indices) + -len(indices) % step
        frames = np.empty((num_frames, 3, *size), np.uint8)
        for position, frame in enumerate(video.read(indices)):
            frames[position] = self._resize(frame, size)
        # As transformers does: the last frame fills a temporal patch.
        frames[len(indices) :] = frames[len(indices) - 1]
        fps = header.fps or DEFAULT_FPS
        sampled_fps = len(indices) / header.frames * fps
        codes, grid = self._patchify(frames)
        shape = (len(codes), codes[0].size)
        return {
            PIXELS: StoredTensor(shape, codes, self.table),
            GRID: stored(np.array([grid], np.int64)),
            SECONDS: stored(np.array([step / sampled_fps], np.float32)),
            INDICES: stored(np.array(indices, np.int64)),
            FPS: stored(np.array([fps], np.float64)),
        }

    def _resize(self, frame: Frame, size: tuple[int, int]) -> Frame:
        """A frame [3, height, width], resized by torch as torchvision does it on the CPU."""
        import torch  # noqa: PLC0415 - only to resize

        planes = np.ascontiguousarray(frame.transpose(2, 0, 1))
        if planes.shape[1:] == size:
            return planes
        resized = torch.nn.functional.interpolate(
            torch.from_numpy(planes)[None],
            size=size,
            mode="bicubic" if self.video_settings.resample == BICUBIC else "bilinear",
            align_corners=False,
            antialias=True,
        )
        return resized[0].numpy()

    def _patchify(self, frames: Frame) -> tuple[Frame, tuple[int, int, int]]:
        """(bytes of patches [patches, channels, pixels of a channel], grid) of frames [frames,
        channels, height, width]: a token's patches lie together."""
        settings = self.video_settings
        count, channels, height, width = frames.shape
        grid = (
            count // settings.temporal_patch_size,
            height // settings.patch_size,
            width // settings.patch_size,
        )
        rows, columns = (num_patches // settings.merge_size for num_patches in grid[1:])
        sides = settings.merge_size, settings.patch_size
        # Shape: time, frames of a patch, channels, rows, merge, patch, columns, merge, patch.
        blocks = frames.reshape(
            grid[0], settings.temporal_patch_size, channels, rows, *sides, columns, *sides
        )
        ordered = blocks.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return ordered.reshape(grid[0] * grid[1] * grid[2], channels, -1), grid

    def replacement(self, tensors: Tensors) -> str:
        metadata = SimpleNamespace(
            fps=float(tensors[FPS].numpy()[0]),
            frames_indices=tensors[INDICES].numpy().tolist(),
        )
        inputs = {"video_grid_thw": tensors[GRID].numpy(), "video_metadata": [metadata]}
        return str(self.processor.replace_video_token(inputs, video_idx=0))


def load_video_processor(
    path: str, revision: str | None, tokenizer: Any, bounds: MediaBounds = UNBOUNDED
) -> VideoProcessor | None:
    """The video processor in a folder or hub repository; None if it has none.

    `tokenizer` is the one of the same folder. Raises CapabilityError for processors that are not
    supported, ConfigError if the files cannot be used.
    """
    files = ProcessorFiles(path, revision)
    cls = processor_class(files) if files.has_processor else None
    if cls is None or "video_processor" not in cls.get_attributes():
        return None
    name, values = _read_config(files)
    if name is None:
        return None
    settings = read_video_settings(name, values, bounds)
    try:
        processor = build_processor(cls, {}, tokenizer, files)
    except Exception as error:
        raise ConfigError(
            f"The video processor of {path} cannot be loaded: {first_line(error)}"
        ) from error
    # What the texts of videos depend on, of a class that cannot be imported without torchvision.
    processor.video_processor = SimpleNamespace(
        merge_size=settings.merge_size, temporal_patch_size=settings.temporal_patch_size
    )
    video = VideoProcessor(processor, {}, video_settings=settings, bounds=bounds)
    video.require_token()
    return video


def _read_config(files: ProcessorFiles) -> tuple[str | None, Mapping[str, Any]]:
    """(class of the video processor, its settings), in the order in which transformers looks for
    them."""
    nested = files.read(PROCESSOR).get("video_processor")
    values = nested or files.read(VIDEO_PROCESSOR) or files.read(IMAGE_PROCESSOR)
    if name := values.get("video_processor_type"):
        return name, values
    if name := values.get("image_processor_type"):
        return name.removesuffix("Fast").replace("ImageProcessor", "VideoProcessor"), values
    from transformers.models.auto.video_processing_auto import (  # noqa: PLC0415
        VIDEO_PROCESSOR_MAPPING_NAMES,
    )

    by_type = VIDEO_PROCESSOR_MAPPING_NAMES.get(files.read("config.json").get("model_type", ""))
    return (by_type or {}).get("torchvision"), values
