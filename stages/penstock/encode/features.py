"""Features of images and videos, shared by all runs: `features/<key of the vision part>/<key of the
images>.arrow`."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.core.cache.noted_files import get_or_write, read_notes
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import short
from penstock.core.errors import ConfigError
from penstock.core.files import fsync
from penstock.core.sources.hub import MODEL_FILES, local_folder
from penstock.core.sources.pin_remote import resolve_folder
from penstock.engine.hf.config import read_hf_config
from penstock.engine.vision.encoded import load_tower, require_encodable, tower_digest
from penstock.media.cache import media_name
from penstock.media.kinds import IMAGE, VIDEO
from penstock.media.load import load_processor
from penstock.models.vision.features import encode_images
from penstock.models.vision.tower import VisionTower
from penstock.models.vision.types import read_vision
from penstock.rows.image_files import ImageFiles, StoredImage, write_images
from penstock.rows.pixel_table import StoredTensor, stored
from penstock.rows.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from penstock.encode.settings import EncodeSettings
    from penstock.encode.stage import Encode

log = logging.getLogger("penstock.encode")

FORMAT = 1
"""Increase it if the same images must have other features."""

# A file is there whole or not at all, so an attempt that is killed loses at most so many.
IMAGES_PER_FILE = 64


@dataclass(frozen=True)
class Features:
    """The features of a prepared artifact's images under one vision part."""

    folder: Path
    files: Sequence[Path]
    """The files of the images."""
    images: ImageFiles
    tower: VisionTower
    settings: "EncodeSettings"

    @classmethod
    def load(cls, stage: "Encode", files: Sequence[Path]) -> "Features":
        """Load the vision part. Raises ConfigError and CapabilityError for models whose features
        cannot be stored."""
        origin, settings = stage.origin, stage.settings
        config_path = origin.config_path
        if origin.config.pin["kind"] != "builtin":
            config_path = str(local_folder(config_path, origin.config, MODEL_FILES))
        hf_config = read_hf_config(config_path, origin.foundation)
        require_encodable(stage.run_config, read_vision(hf_config))
        if not (origin.model_path and origin.weights):
            raise ConfigError(
                "model.model_path is not set, and images are encoded with its weights."
            )
        tower = load_tower(hf_config, local_folder(origin.model_path, origin.weights))
        key = {
            "format": FORMAT,
            "dtype": settings.dtype,
            "projected": settings.projected,
            "tower": tower_digest(tower, projected=settings.projected),
            "processor": _processor_key(stage, IMAGE.name),
        }
        images = ImageFiles(files)
        if VIDEO.name in images.kinds():
            key["video processor"] = _processor_key(stage, VIDEO.name)
        folder = stage.root / "features" / short(digest_json(key))
        return cls(folder, files, images, tower, settings)

    def missing(self) -> list[bytes]:
        """The images that are to be encoded."""
        return [digest for digest in self.images.digests() if self._known.get(digest) is None]

    def get_or_encode(self) -> list[Path]:
        """The files with the features of all images. Those of one file of images are apart from
        others, so that they are found again beside new ones."""
        files: dict[Path, None] = {}
        for file in self.files:
            digests = ImageFiles([file]).digests()
            for index in range(0, len(digests), IMAGES_PER_FILE):
                some = digests[index : index + IMAGES_PER_FILE]
                target = self.folder / f"{media_name(some)}.arrow"
                get_or_write(target, partial(self._write, some), "wait")
                files[target] = None
        return [*files]

    def _write(self, digests: Sequence[bytes], part: Path) -> Mapping[str, Any]:
        stored = self._known
        count = write_images(
            part, (stored.get(digest) or self._encode(digest) for digest in digests)
        )
        # Its note is on the disk at once, and must not name a file that is not.
        fsync(part)
        log.info("encode: %s has %d images", part.name, count)
        return {"images": count}

    @cached_property
    def _known(self) -> ImageFiles:
        return ImageFiles([*read_notes(sorted(self.folder.glob("*.arrow")))])

    def _encode(self, digest: bytes) -> StoredImage:
        image = self.images.get(digest)
        assert image is not None
        if image.error is not None:
            return image
        device = next(self.tower.parameters()).device
        dtype = getattr(torch, self.settings.dtype)
        tensors = {
            # A copy: the views of the file are read-only, of which torch has no notion but a
            # warning.
            name: torch.from_numpy(np.array(column.numpy())).to(device)
            for name, column in self.images.inputs([digest])[0].items()
        }
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            encoded = encode_images(self.tower, tensors, projected=self.settings.projected)
        features: dict[str, StoredTensor] = {}
        for name, tensor in encoded.items():
            array = tensor.cpu().contiguous()
            if name not in tensors and array.is_floating_point():
                array = array.to(dtype)
                # NumPy has no bfloat16: its bits are stored as int16.
                array = array.view(torch.int16) if dtype == torch.bfloat16 else array
            features[name] = stored(array.numpy())
        return StoredImage(digest, features, image.size)


def _processor_key(stage: "Encode", kind: str) -> str:
    origin = stage.origin
    path = resolve_folder(origin.tokenizer_path, origin.tokenizer)
    revision = origin.tokenizer.pin.get("commit")
    processor = load_processor(kind, path, revision, load_tokenizer(path, revision))
    return processor.key if processor else ""
