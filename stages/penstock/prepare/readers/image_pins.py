"""The images and audio that data names by path, pinned to their content.

Images in the data itself are part of its pin; files beside it are not. Which paths a piece of data
names depends on the piece alone, so they are looked for once and cached; the digests of their files
are cached until a file changes.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from penstock.core.cache.digests import cached_value, digest_files
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import Source
from penstock.media.kinds import READ
from penstock.media.kinds import WORDS as MEDIA_WORDS
from penstock.media.reference import image_path, is_path
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.dataset_type import NO_CONVERSATION
from penstock.prepare.formats.conversation import conversations
from penstock.prepare.formats.registry import parse_record
from penstock.prepare.readers.file_splits import FileSplit, split_source
from penstock.prepare.readers.image_folder import COLUMNS as FOLDER_COLUMNS
from penstock.prepare.readers.records import Chunk, Value
from penstock.prepare.readers.registry import read_chunks
from penstock.prepare.settings import DatasetSettings

FORMAT = 3
"""Increase it if the same data must be found to name other images."""

WORDS = (*MEDIA_WORDS, "image_info", *FOLDER_COLUMNS)
"""Names of columns and members, and types of parts: every record with media has one of them."""

MENTION = re.compile(rb'"(?:%s)\\*"' % "|".join(WORDS).encode())
"""One of these words in JSON, which may be a text in JSON."""

BARE = re.compile("|".join(kind.name for kind in READ).encode())
"""The same among the values of a column."""


def image_root(piece: FileSplit, its: DatasetSettings) -> Path | None:
    """The folder to which paths of images are relative: `image_folder`, or that of the piece's
    file, if it is local and no archive, which holds its images."""
    if its.image_folder is not None:
        return Path(its.image_folder).expanduser()
    if piece.reader == "tar":
        return None
    location = piece.file.location if piece.file else None
    return location.parent if isinstance(location, Path) else None


def with_image_pin(
    source: Source, its: DatasetSettings, columns: tuple[str, ...] | None, token: bool | None
) -> Source:
    """The source, with a digest of the images that it names by path in its pin, if it names any."""
    if source.pin["kind"] != "files" or its.type in NO_CONVERSATION:
        return source
    pieces = split_source(source, ds_type=its.ds_type, streaming=its.streaming, token=token)
    digests = [digest_images([piece], its, columns) for piece in pieces]
    if not any(digests):
        return source
    return replace(source, pin={**source.pin, "images": digest_json(digests)})


def digest_images(
    pieces: Sequence[FileSplit], its: DatasetSettings, columns: tuple[str, ...] | None
) -> str | None:
    """Digest of the images that these pieces name by path, with the paths as they are written; None
    if there are none."""
    if its.type in NO_CONVERSATION:
        return None
    named: list[tuple[str, Path | None]] = []
    for piece in pieces:
        root = image_root(piece, its)
        if root is not None and piece.file is not None:
            named += [(path, image_path(path, root)) for path in _named_paths(piece, its, columns)]
    if not named:
        return None
    there = [path for _, path in named if path is not None and path.is_file()]
    digests = dict(zip(there, digest_files(there), strict=True))
    return digest_json([[name, digests.get(path) if path else None] for name, path in named])


def _named_paths(
    piece: FileSplit, its: DatasetSettings, columns: tuple[str, ...] | None
) -> list[str]:
    """The distinct paths of images in a piece, in order."""
    read = {name: value for name, value in its.model_dump(mode="json").items() if "field" in name}
    content = digest_json([FORMAT, "image paths", piece.as_json(), its.type, read, columns])
    return cached_value(content, lambda: list(dict.fromkeys(_iter_paths(piece, its, columns))))


def _iter_paths(
    piece: FileSplit, its: DatasetSettings, columns: tuple[str, ...] | None
) -> Iterator[str]:
    searched: dict[int, bool] = {}
    for chunk in read_chunks(piece):
        for value in _mentioning(chunk, searched):
            try:
                said = parse_record(its, value, columns)
            except BadRecord:
                continue
            for each in conversations(said):
                yield from (ref.location for _, ref in each.media if is_path(ref))


def _mentioning(chunk: Chunk, searched: dict[int, bool]) -> list[Value]:
    """The records that may have images; the others are not parsed."""
    items = chunk.items
    if isinstance(items, pa.RecordBatch):
        return chunk.values() if _mentions(items, searched) else []
    if items and isinstance(items[0], bytes):
        return chunk.parse([line for line in items if MENTION.search(line)])
    return chunk.values()


def _mentions(batch: pa.RecordBatch, searched: dict[int, bool]) -> bool:
    names = set(_field_names(batch.schema))
    if names & {*WORDS}:
        return True
    pattern = BARE if "type" in names else MENTION
    for buffer in (each for column in batch.columns for each in column.buffers() if each):
        if buffer.address not in searched:
            searched[buffer.address] = pattern.search(memoryview(buffer)) is not None
        if searched[buffer.address]:
            return True
    return False


def _field_names(fields: Iterable[pa.Field]) -> Iterator[str]:
    for field in fields:
        yield field.name
        kind = field.type
        yield from _field_names(kind.field(at) for at in range(kind.num_fields))
