"""Read, decode and process the images and audio of one slice."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.core.errors import StageError
from penstock.media.cache import MediaCache
from penstock.media.kinds import BadMedia
from penstock.media.originals import Originals
from penstock.media.reference import ImageRef, image_digest, is_path, read_image
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.encode.images import LoadedKind, Located, SliceImages, locate
from penstock.prepare.readers.records import Batch


def load_slice_images(
    encode: Encoder,
    read: Callable[[], Iterable[Batch]],
    open_cache: Callable[[str], MediaCache | None],
    kinds: Sequence[str] = (),
) -> tuple[SliceImages | None, list[str]]:
    """(the images and audio of a slice, names of the files that have them); None if the model takes
    none of their kinds.

    All are read first; those that no file has are then decoded, in the order of their first use.
    `open_cache` gives the cache of a kind, None if the model does not take it; that of `kinds` is
    asked for also if there are none. Raises StageError if
    a file is truncated, or media change meanwhile.
    """
    caches = dict[str, MediaCache | None]()
    found = dict[str, _FoundImages]()

    def ask(kind: str) -> None:
        if kind not in caches:
            cache = caches[kind] = open_cache(kind)
            if cache is not None:
                found[kind] = _FoundImages(cache.originals)

    for kind in kinds:
        ask(kind)
    for batch in read():
        for kind, ref in encode.iter_media(batch.values):
            ask(kind)
            if ref is not None and kind in found:
                found[kind].add(ref, batch.folder)
    loaded, names = dict[str, LoadedKind](), list[str]()
    for kind, its in found.items():
        cache = caches[kind]
        assert cache is not None
        name, files = cache.get_or_process(its.digests(), its.read)
        loaded[kind] = LoadedKind(cache.processor, files, its.by_place)
        names.append(name)
    return SliceImages(loaded) if loaded else None, names


@dataclass(frozen=True)
class _FoundImages:
    """The media of one kind in a slice, by their place in records and by digest.

    Files are read again where they are; images in the data itself and of the web are stored.
    """

    originals: Originals
    by_place: dict[Located, bytes | BadRecord] = field(default_factory=dict)
    paths: dict[bytes, tuple[ImageRef, Path | None]] = field(default_factory=dict)

    def add(self, ref: ImageRef, folder: Path | None) -> None:
        """Read an image, unless it was read before."""
        place = locate(ref, folder)
        if place in self.by_place:
            return
        try:
            content = read_image(ref, folder, self.originals)
        except BadMedia as error:
            self.by_place[place] = BadRecord("bad_value", f"{ref.kind} {ref}: {error}")
            return
        digest = image_digest(content)
        self.by_place[place] = digest
        if is_path(ref):
            self.paths.setdefault(digest, (ref, folder))
        else:
            self.originals.add(content)

    def digests(self) -> list[bytes]:
        """The distinct images that could be read, in order."""
        return list(dict.fromkeys(d for d in self.by_place.values() if isinstance(d, bytes)))

    def read(self, digest: bytes) -> bytes:
        """The encoded image. Raises StageError if it is gone."""
        if digest not in self.paths:
            content = self.originals.read(digest)
            place = str(self.originals.path(digest))
        else:
            ref, folder = self.paths[digest]
            place = str(ref)
            try:
                content = read_image(ref, folder, self.originals)
            except BadMedia:
                content = None
        if content is None or image_digest(content) != digest:
            raise StageError(f"image {place} was deleted or changed during this run.\n  Run again.")
        return content
