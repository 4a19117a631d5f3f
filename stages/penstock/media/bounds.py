"""Bounds of a data set on the size of its images and the frames of its videos, in place of those in
the files of the model's processor."""

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from penstock.core.errors import ConfigError
from penstock.media.kinds import IMAGE, VIDEO


@dataclass(frozen=True)
class MediaBounds:
    """The fields of a data set; None: as the processor's files say."""

    image_min_pixels: int | None = None
    image_max_pixels: int | None = None
    video_fps: float | None = None
    video_min_frames: int | None = None
    video_max_frames: int | None = None

    def of(self, kind: str) -> dict[str, Any]:
        """Those of a kind of media that are set, by their names."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name.startswith(f"{kind}_") and value is not None
        }

    @property
    def kinds(self) -> list[str]:
        return [kind.name for kind in (IMAGE, VIDEO) if self.of(kind.name)]

    def stored_digest(self, kind: str, digest: bytes) -> bytes:
        """The identity, given that of an image or video, of its tensors under these bounds: other
        data sets of a run may have other ones."""
        own = self.of(kind)
        return sha256(digest + json.dumps(own).encode()).digest() if own else digest

    def of_size(self, size: dict[str, int]) -> dict[str, int]:
        """A processor's size `{shortest_edge, longest_edge}`, in pixels, with those of images.
        Raises ConfigError if none is left between."""
        edges = {"shortest_edge": self.image_min_pixels, "longest_edge": self.image_max_pixels}
        bounded = {**size, **{edge: value for edge, value in edges.items() if value is not None}}
        least, most = bounded["shortest_edge"], bounded["longest_edge"]
        if least > most:
            name, opposite = "image_max_pixels", "image_min_pixels"
            if self.image_max_pixels is None:
                name, opposite = opposite, name
            raise ConfigError(
                f"{name} is {getattr(self, name):,}, and the image processor has from {least:,} to"
                f" {most:,} pixels then.\n  Write {opposite} too."
            )
        return bounded


UNBOUNDED = MediaBounds()
