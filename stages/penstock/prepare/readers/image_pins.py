"""The images, audio and videos that data names by path, pinned to their content.

Images in the data itself are part of its pin; files beside it are not. Which paths a piece of data
names depends on the piece alone, so they are looked for once and cached; the digests of their files
are cached until a file changes.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.core.cache.digest_cache import cached_value, digest_files
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import Source
from penstock.core.errors import StageError
from penstock.core.process.retry import PLANNING_TRIES
from penstock.core.remote.path import RemotePath
from penstock.core.remote.urls import WEB, split_parent, url_scheme
from penstock.core.remote.version import is_digest
from penstock.core.sources.local_files import permission_error
from penstock.media.kinds import KINDS
from penstock.media.kinds import WORDS as MEDIA_WORDS
from penstock.media.reference import Folder, file_version, image_path, name_below
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.dataset_type import NO_CONVERSATION
from penstock.prepare.formats.conversation import conversations
from penstock.prepare.formats.registry import parse_record
from penstock.prepare.readers.file_splits import FileSplit, split_source
from penstock.prepare.readers.image_folder import COLUMNS as FOLDER_COLUMNS
from penstock.prepare.readers.image_folder import is_metadata
from penstock.prepare.readers.records import Chunk, Value
from penstock.prepare.readers.registry import read_chunks
from penstock.prepare.settings import DatasetSettings

FORMAT = 5
"""Increase it if the same data must be found to name other images."""

# Names of columns and members, and types of parts: every record with media has one of them.
WORDS = (*MEDIA_WORDS, "image_info", *FOLDER_COLUMNS)

# One of these words in JSON, which may be a text in JSON.
MENTION = re.compile(rb'"(?:%s)\\*"' % "|".join(WORDS).encode())

BARE = re.compile("|".join(KINDS).encode())
"""The same among the values of a column."""


Searched = dict[tuple[int, int], tuple[pa.Buffer, bool]]
"""The buffers of a batch by address and size, and whether each has a word."""


def image_root(piece: FileSplit, settings: DatasetSettings) -> Folder | None:
    """The folder to which paths of images are relative: `image_folder`, or that of the piece's
    file, if it is no archive, which holds its images, and local or the metadata of an image folder
    in an object store."""
    if settings.image_folder is not None:
        return Path(settings.image_folder).expanduser()
    if piece.reader == "tar":
        return None
    location = piece.file.location if piece.file else None
    if isinstance(location, Path):
        return location.parent
    is_listed = location is not None and url_scheme(location) not in WEB and is_metadata(piece.name)
    return split_parent(location)[0] if location and is_listed else None


def with_image_pin(
    source: Source, settings: DatasetSettings, columns: tuple[str, ...] | None, token: bool | None
) -> Source:
    """The source, with a digest of the images that it names by path in its pin, if it names any."""
    if source.pin["kind"] != "files" or settings.type in NO_CONVERSATION:
        return source
    digests = [
        digest_images([piece], settings, columns)
        for piece in source_pieces(source, settings, token)
    ]
    if not any(digests):
        return source
    return replace(source, pin={**source.pin, "images": digest_json(digests)})


def require_unchanged_source(
    source: Source, settings: DatasetSettings, columns: tuple[str, ...] | None, token: bool | None
) -> None:
    """Raise StageError if the images of a source are no longer what they were when it was
    pinned."""
    if (
        "images" in source.pin
        and with_image_pin(source, settings, columns, token).pin != source.pin
    ):
        raise _changed(source_pieces(source, settings, token), settings, columns)


def require_unchanged_images(
    pieces: Sequence[FileSplit],
    settings: DatasetSettings,
    columns: tuple[str, ...] | None,
    digest: str,
) -> None:
    """Raise StageError if the images of these pieces no longer have the digest."""
    if digest_images(pieces, settings, columns) != digest:
        raise _changed(pieces, settings, columns)


def _changed(
    pieces: Sequence[FileSplit], settings: DatasetSettings, columns: tuple[str, ...] | None
) -> StageError:
    """The error for images that have changed; which they are is known by their times alone."""
    changed: list[tuple[int, str]] = []
    for piece in pieces:
        if isinstance(root := image_root(piece, settings), Path):
            paths = [image_path(name, root) for name in _named_paths(piece, settings, columns)]
            stats = [(path, path.stat()) for path in paths if path and path.is_file()]
            changed += [(stat.st_ctime_ns, str(path)) for path, stat in stats]
    latest = f"; the last change is of {max(changed)[1]}" if changed else ""
    return StageError(
        f"Files that the records of {pieces[0].name} name have changed since this run started"
        f"{latest}.\n  Run again when no process writes to them."
    )


def source_pieces(source: Source, settings: DatasetSettings, token: bool | None) -> list[FileSplit]:
    """The pieces of a source that its settings read; of Megatron data, all documents."""
    return split_source(
        source,
        ds_type=settings.ds_type,
        streaming=settings.streaming,
        token=token,
        max_record_bytes=settings.max_record_bytes,
    )


def digest_images(
    pieces: Sequence[FileSplit], settings: DatasetSettings, columns: tuple[str, ...] | None
) -> str | None:
    """Digest of the images that these pieces name by path, with the paths as they are written; None
    if there are none."""
    if settings.type in NO_CONVERSATION:
        return None
    pins: list[tuple[str, Any]] = []
    for piece in pieces:
        root = image_root(piece, settings)
        if root is not None and piece.file is not None:
            names = _named_paths(piece, settings, columns)
            versions = _versions_of_remote if isinstance(root, str) else _digests_of_local
            pins += zip(names, versions(names, root), strict=True)
    return digest_json(pins) if pins else None


def _digests_of_local(names: Sequence[str], root: Folder) -> list[str | None]:
    paths = [image_path(name, Path(root)) for name in names]
    existing = [path for path in paths if path is not None and path.is_file()]
    try:
        digests = dict(zip(existing, digest_files(existing), strict=True))
    except PermissionError as error:
        raise permission_error(Path(str(error.filename))) from error
    return [digests.get(path) if path else None for path in paths]


def _versions_of_remote(names: Sequence[str], root: Folder) -> list[Any]:
    remote_root = RemotePath.from_url(str(root))
    infos = remote_root.files(tries=PLANNING_TRIES) if names else {}
    versions: list[Any] = []
    for path in map(name_below, names):
        if path is None or path not in infos:
            versions.append(None)
            continue
        version = file_version(infos[path])
        # Versions that are no digests are unique per server only.
        more = {} if is_digest(version) else {"url": (remote_root / path).redacted_url}
        versions.append({**version, **more})
    return versions


def _named_paths(
    piece: FileSplit, settings: DatasetSettings, columns: tuple[str, ...] | None
) -> list[str]:
    content = digest_json(
        [FORMAT, "image paths", piece.as_json(), settings.type, settings.parsed_by, columns]
    )
    return cached_value(content, lambda: list(dict.fromkeys(_iter_paths(piece, settings, columns))))


def _iter_paths(
    piece: FileSplit, settings: DatasetSettings, columns: tuple[str, ...] | None
) -> Iterator[str]:
    searched: Searched = {}
    for chunk in read_chunks(piece):
        for value in _mentioning(chunk, searched):
            try:
                parsed = parse_record(settings, value, columns)
            except BadRecord:
                continue
            for conversation in conversations(parsed):
                yield from (path for _, ref in conversation.media for path in ref.paths)


def _mentioning(chunk: Chunk, searched: Searched) -> list[Value]:
    """The records that may have images; the others are not parsed."""
    items = chunk.items
    if isinstance(items, pa.RecordBatch):
        return chunk.values() if _mentions(items, searched) else []
    if items and isinstance(items[0], bytes):
        return chunk.parse([line for line in items if MENTION.search(line)])
    return chunk.values()


def _mentions(batch: pa.RecordBatch, searched: Searched) -> bool:
    names = set(_field_names(batch.schema))
    if names & {*WORDS} or any(map(_has_inner_dictionary, batch.schema.types)):
        return True
    pattern = BARE if "type" in names else MENTION
    buffers = {(buffer.address, buffer.size): buffer for buffer in _buffers(batch.columns)}
    # The chunks of a batch share its buffers. Once it is freed, the next one's may be where
    # they were: a buffer is known by its address only as long as it is held.
    for key in searched.keys() - buffers.keys():
        del searched[key]
    for key, buffer in buffers.items():
        if key not in searched:
            # re searches the buffer where it is: no row becomes a Python value for it.
            searched[key] = buffer, pattern.search(memoryview(buffer)) is not None
        if searched[key][1]:
            return True
    return False


# Those of dictionaries too, which `Array.buffers` leaves out.
def _buffers(arrays: Iterable[Any]) -> Iterator[pa.Buffer]:
    for array in arrays:
        yield from filter(None, array.buffers())
        if pa.types.is_dictionary(array.type):
            yield from _buffers([array.dictionary])


def _has_inner_dictionary(kind: pa.DataType) -> bool:
    """Whether lists or structs have a dictionary, which is not searched."""
    kinds = [field.type for field in _fields(kind)]
    return any(pa.types.is_dictionary(inner) or _has_inner_dictionary(inner) for inner in kinds)


def _field_names(fields: Iterable[pa.Field]) -> Iterator[str]:
    for field in fields:
        yield field.name
        yield from _field_names(_fields(field.type))


def _fields(kind: pa.DataType) -> list[pa.Field]:
    """Those of a type, or of the values of a dictionary."""
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    return [inner.field(index) for index in range(inner.num_fields)]
