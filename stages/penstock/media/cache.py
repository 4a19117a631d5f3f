"""Cache of processed images and audio: `<folder>/<processor key>/<key of the images>.arrow`.

A file has the images of one slice, in the order of their first use. Images that another file of the
same processor has are copied, so that an image is decoded and processed once.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.core.cache.noted_files import get_or_write, read_notes
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import short
from penstock.core.files import fsync
from penstock.core.remote.shared_files import SharedCache
from penstock.media.model_processor import ModelProcessor
from penstock.media.originals import ORIGINALS, Originals
from penstock.rows.image_files import MEDIA, ImageFiles, StoredImage, write_images

log = logging.getLogger("penstock.prepare")

FORMAT = 1  # Increase it if the same images must be written differently


@dataclass
class MediaCounts:
    """Images since the process began."""

    used: int = 0  # Images of the files that were asked for
    processed: int = 0  # Images that were decoded and processed


@dataclass(frozen=True)
class MediaCache:
    """The processed images of one processor in the slice cache."""

    root: Path  # Folder of the slice cache
    processor: ModelProcessor
    shared: SharedCache | None = None
    counts: MediaCounts = field(default_factory=MediaCounts)

    @property
    def folder(self) -> Path:
        return self.root / MEDIA / self.processor.key

    @property
    def originals(self) -> Originals:
        return Originals(self.root / MEDIA / ORIGINALS)

    def get_or_process(
        self, digests: Sequence[bytes], read: Callable[[bytes], bytes]
    ) -> tuple[str, ImageFiles]:
        """(name of the file below the slice cache's media folder, its images). `digests` are
        distinct; `read` gives the encoded image of each."""
        name = media_name(digests)
        target = self.folder / f"{name}.arrow"
        files = (f"{MEDIA}/{self.processor.key}/{name}{end}" for end in (".arrow", ".json"))
        names = tuple(files)
        if self.shared:
            self.shared.exchange({names})

        def send() -> None:
            if self.shared:
                self.shared.send(names)

        self.counts.used += len(digests)
        get_or_write(target, lambda part: self._write(part, digests, read), "wait", send)
        return f"{self.processor.key}/{name}", ImageFiles([target])

    def _write(
        self, part: Path, digests: Sequence[bytes], read: Callable[[bytes], bytes]
    ) -> Mapping[str, Any]:
        before = self.counts.processed
        kind = self.processor.kind
        count = write_images(part, self._images(digests, read), self.processor.unused, kind.name)
        fsync(part)
        done = self.counts.processed - before
        log.info("prepare: %d %s, of which %d were decoded and processed", count, kind.plural, done)
        return {"images": count}

    def _images(
        self, digests: Sequence[bytes], read: Callable[[bytes], bytes]
    ) -> Iterator[StoredImage]:
        # Also those that other runs have written since.
        self._known.add([*read_notes(sorted(self.folder.glob("*.arrow")))])
        for digest in digests:
            stored = self._known.get(digest)
            if stored is None:
                content = read(digest)
                self.counts.processed += 1
                stored = self.processor.store(digest, content)
            yield stored

    @cached_property
    def _known(self) -> ImageFiles:
        return ImageFiles([])


def media_name(digests: Sequence[bytes]) -> str:
    """Name of the file of these images, 16 hex digits."""
    return short(digest_json([FORMAT, [digest.hex() for digest in digests]]))
