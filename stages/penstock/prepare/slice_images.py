"""Read, decode and process the images, audio and videos of one slice."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.core.errors import CapabilityError, ConfigError, StageError
from penstock.media.cache import MediaCache
from penstock.media.kinds import KINDS, BadMedia, MissingPackages
from penstock.media.model_processor import ModelProcessor
from penstock.media.originals import Originals
from penstock.media.reference import Folder, ImageRef, image_digest, read_image
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.encode.images import LoadedKind, Located, SliceImages, locate
from penstock.prepare.readers.records import Batch


def load_slice_images(
    encode: Encoder,
    read: Callable[[], Iterable[Batch]],
    open_cache: Callable[[str], MediaCache | None],
    kinds: Sequence[str] = (),
    *,
    allow_private: bool = False,
) -> tuple[SliceImages | None, list[str]]:
    """(the media of a slice, names of the files that have them); None if the model takes
    none of their kinds.

    All are read first; those that no file has are then decoded, in the order of their first use.
    `open_cache` gives the cache of a kind, None if the model does not take it; that of the first of
    `kinds` that it takes is asked for also if there are none. With `allow_private`
    URLs may lead to private addresses. Raises StageError if a file is truncated, or media change
    meanwhile.
    """
    caches = dict[str, MediaCache | None]()
    images_by_kind = dict[str, _FoundImages]()

    def ask(kind: str) -> None:
        if kind not in caches:
            cache = caches[kind] = open_cache(kind)
            if cache is not None:
                images_by_kind[kind] = _FoundImages(cache.originals, cache.processor, allow_private)

    for kind in kinds:
        if not images_by_kind:
            ask(kind)
    for batch in read():
        for kind, ref, several in encode.iter_media(batch.values):
            ask(kind)
            if ref is not None and kind in images_by_kind:
                images_by_kind[kind].add(ref, batch.folder, several=several)
    loaded, names = dict[str, LoadedKind](), list[str]()
    for kind, kind_images in images_by_kind.items():
        cache = caches[kind]
        assert cache is not None
        name, files = cache.get_or_process([*kind_images.stored], kind_images.read)
        loaded[kind] = LoadedKind(cache.processor, files, kind_images.by_place, kind_images.lacking)
        names.append(name)
    if not loaded:
        return None, names
    return SliceImages(loaded, _other_processors(loaded, open_cache)), names


def _other_processors(
    loaded: Collection[str], open_cache: Callable[[str], MediaCache | None]
) -> list[ModelProcessor]:
    """The model's processors of kinds that a slice has none of: their tokens may not be in its
    texts. Those that cannot be used stand for none."""
    processors: list[ModelProcessor] = []
    for kind in KINDS:
        try:
            cache = None if kind in loaded else open_cache(kind)
        except (CapabilityError, ConfigError):
            continue
        if cache is not None:
            processors.append(cache.processor)
    return processors


@dataclass(frozen=True)
class _FoundImages:
    """The media of one kind in a slice, by their place in records and by digest.

    Files are read again where they are; images in the data itself, of the web and of object stores
    are stored.
    """

    originals: Originals
    processor: ModelProcessor
    allow_private: bool
    by_place: dict[Located, bytes | BadRecord] = field(default_factory=dict)
    stored: dict[bytes, bytes] = field(default_factory=dict)
    """The digests under which their tensors are stored, in the order of their first use, with those
    of their bytes."""
    lacking: set[str] = field(default_factory=set)
    """Extras of this package that some need."""
    paths: dict[bytes, tuple[ImageRef, Folder | None]] = field(default_factory=dict)

    def add(self, ref: ImageRef, folder: Folder | None, *, several: bool) -> None:
        located = locate(ref, folder)
        if located not in self.by_place:
            self._read_first(ref, folder, located)
        digest = self.by_place[located]
        if isinstance(digest, bytes):
            self.stored[self.processor.stored_digest(digest, several=several)] = digest

    def _read_first(self, ref: ImageRef, folder: Folder | None, located: Located) -> None:
        try:
            content = read_image(ref, folder, self.originals, allow_private=self.allow_private)
            self.processor.require_packages(content)
        except BadMedia as error:
            if isinstance(error, MissingPackages):
                self.lacking.add(error.extra)
            self.by_place[located] = BadRecord("bad_value", f"{ref.kind} {ref}: {error}")
            return
        digest = image_digest(content)
        self.by_place[located] = digest
        if ref.is_path and not isinstance(folder, str):
            self.paths.setdefault(digest, (ref, folder))
        else:
            self.originals.add(content)

    def read(self, stored: bytes) -> bytes:
        """The encoded image. Raises StageError if it is gone."""
        digest = self.stored[stored]
        if digest not in self.paths:
            content = self.originals.read(digest)
            path = str(self.originals.path(digest))
        else:
            ref, folder = self.paths[digest]
            path = str(ref)
            try:
                content = read_image(ref, folder, self.originals, allow_private=self.allow_private)
            except BadMedia:
                content = None
        if content is None or image_digest(content) != digest:
            raise StageError(f"image {path} was deleted or changed during this run.\n  Run again.")
        return content
