"""The encode stage: images of prepared samples to features of the frozen vision tower."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from penstock.config.schema.run import RunConfig
from penstock.core.cache.manifest import listed_files
from penstock.core.cache.record import read_record, write_record
from penstock.core.cache.stage import Artifact, Facts, Input, Stage
from penstock.core.errors import ConfigError
from penstock.encode.settings import EncodeSettings
from penstock.engine.model_source import ModelSource

FEATURES = "features"
"""Folder of features shared by all runs, beside `encode`; one subfolder per vision part."""

MISSING = "missing.json"
"""In an attempt: how many images had no features when it began."""


@dataclass(frozen=True)
class Encode(Stage):
    """Input: prepared samples. Output: `media/<key of the images>.arrow`, features by the digest of
    each image.

    An image is encoded once per vision part, processor and dtype, whatever the text is: features
    are shared by all runs, and the result has links to them.
    """

    name: ClassVar[str] = "encode"
    version: ClassVar[int] = 1

    settings: EncodeSettings  # pyright: ignore[reportIncompatibleVariableOverride]
    prepared: Artifact
    origin: ModelSource
    """The model; its config and weights are part of the cache key."""
    run_config: RunConfig
    root: Path
    """Local folder with the shared features in its subfolder `features`."""

    @property
    def inputs(self) -> Mapping[str, Input]:
        """The prepared samples, and the model's config and weights."""
        inputs: dict[str, Input] = {"prepared": self.prepared, "config": self.origin.config}
        return {**inputs, "weights": self.origin.weights} if self.origin.weights else inputs

    def run(self, out: Path) -> Facts:
        """Encode the images without features, and link those of all images.

        An attempt continues where an earlier one stopped: a file of features is written at once.
        """
        # Here, as the features import torch, without which a finished stage is planned.
        from penstock.core.cache.digest_cache import keep_cached_across_links
        from penstock.core.files import link
        from penstock.encode.features import Features
        from penstock.rows.image_files import MEDIA

        images = listed_files(self.prepared.path / MEDIA, "*.arrow")
        if not images:
            return {"images": 0, "encoded": 0}
        features = Features.load(self, images)
        count, noted = len(features.images.digests()), out / MISSING
        # Of the first attempt: a later one finds the features that it wrote, and would count none.
        if not noted.is_file():
            write_record(noted, {"missing": len(features.missing())})
        missing = read_record(noted, f"Delete {noted} and run again.")["missing"]
        sys.stderr.write(f"encode: {count} images, {missing} without features\n")
        files = features.get_or_encode()
        (out / MEDIA).mkdir(parents=True, exist_ok=True)
        with keep_cached_across_links(files):
            for file in files:
                link(file, out / MEDIA / file.name)
        return {"images": count, "encoded": missing}

    def owned_files(self, out: Path) -> Iterable[Path]:
        """The features; how many were missing depends on earlier runs."""
        return sorted((out / "media").glob("*.arrow"))


def no_encoding() -> ConfigError:
    """Error for a run without an encode stage."""
    return ConfigError(
        "this run has no encode stage: data.encode_images is false.\n"
        "  Write encode_images: true, or train without it."
    )
