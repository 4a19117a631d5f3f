"""Locate the record of a prepared sample: its file, the line or row in it, and its images."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from penstock.core.cache.stage import Stage
from penstock.core.errors import PenstockError
from penstock.media.bounds import MediaBounds
from penstock.media.kinds import BadMedia
from penstock.media.originals import ORIGINALS, Originals
from penstock.media.reference import WEB, among_several, image_digest, read_image
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.formats.conversation import conversations
from penstock.prepare.formats.registry import parse_record
from penstock.prepare.readers.file_splits import FileSplit
from penstock.prepare.readers.read_slice import count_records_before, read_records
from penstock.prepare.readers.registry import read_chunks
from penstock.prepare.slices import Slice
from penstock.prepare.stage import SLICES, Prepare
from penstock.rows.image_files import MEDIA

# Readers of files in which the line of a record does not follow from its index.
LINE_READERS = ("json_lines", "csv", "json_document")


@dataclass(frozen=True)
class RecordLocation:
    """Location of a record in its source."""

    file: str
    """A file, or the name of a hub or built-in data set."""
    line: int
    """Line, or row in files without lines, from 1."""


Locate = Callable[[str, int], RecordLocation | None]
"""(slice key, record index in the slice from 0) -> location of the record."""

ReadImages = Callable[[str, int], dict[bytes, bytes]]
"""(slice key, record index in the slice from 0) -> encoded images by digest, alone and
among several."""


def build_locator(stage: Stage) -> Locate:
    """Build a function that locates records of a prepared artifact; it returns None if the sources
    cannot be read or are not those of the artifact."""
    if not isinstance(stage, Prepare):
        return lambda *_: None
    token = stage.hub_token
    try:
        slices = {item.key: item for item in stage.slices()}
    except PenstockError:
        return lambda *_: None

    def locate(key: str, row: int) -> RecordLocation | None:
        return locate_row(slices[key], row, token) if key in slices else None

    return locate


def locate_row(item: Slice, row: int, token: bool | None = None) -> RecordLocation | None:
    """Locate record `row` of the slice, from 0. None if a remote file would have to be fetched.

    Counts lines without parsing. Raises StageError if a file has changed or is missing.
    """
    record_index = item.first + item.step * row
    for piece in item.pieces:
        if piece.stop is None or record_index < piece.stop - piece.start:
            line = _find_line(piece, piece.start + record_index, token)
            return None if line is None else RecordLocation(piece.name, line)
        record_index -= piece.stop - piece.start
    raise IndexError(f"record {row} of slice {item.key}")


def _find_line(piece: FileSplit, number: int, token: bool | None) -> int | None:
    if piece.reader not in LINE_READERS and piece.records_before is not None:
        return piece.records_before + number + 1
    if piece.file is None or not isinstance(piece.file.location, Path):
        return None
    for chunk in read_chunks(piece, token):
        if number < len(chunk):
            return count_records_before(piece, token) + chunk.positions[number]
        number -= len(chunk)
    raise IndexError(f"record {number} beyond the end of {piece.name}")


def build_image_reader(stage: Stage, out: Path) -> ReadImages:
    """Build a function that reads the images of records of a prepared artifact, in `out`. Images
    that are gone are left out, and none is fetched from the web."""
    if not isinstance(stage, Prepare):
        return lambda *_: {}
    try:
        slices = {item.key: item for item in stage.slices()}
    except PenstockError:
        return lambda *_: {}
    cache = stage.slices_path or out.parent.parent / SLICES
    originals = Originals(cache / MEDIA / ORIGINALS)
    settings = (*stage.settings.datasets, *stage.settings.test_datasets)
    bounds = {setting.media_bounds for setting in settings}

    def read(key: str, row: int) -> dict[bytes, bytes]:
        if key not in slices:  # the data, or an image, has changed
            return {}
        try:
            return _read_images(slices[key], row, originals, stage.hub_token, bounds)
        except (PenstockError, BadRecord):
            return {}

    return read


def _read_images(
    item: Slice,
    row: int,
    originals: Originals,
    token: bool | None,
    bounds: Collection[MediaBounds],
) -> dict[bytes, bytes]:
    for batch in read_records(item, token):
        if row < len(batch.values):
            break
        row -= len(batch.values)
    else:
        raise IndexError(f"record {row} beyond the end of slice {item.key}")
    parsed = parse_record(item.settings, batch.values[row], item.columns)
    contents: dict[bytes, bytes] = {}
    for ref in (ref for conversation in conversations(parsed) for _, ref in conversation.media):
        try:
            named = (frame.location for frame in ref.frames or (ref,))
            if any(url.startswith(WEB) and originals.find(url) is None for url in named):
                continue
            content = read_image(ref, batch.folder, originals)
        except BadMedia:
            continue
        digest = image_digest(content)
        for form, media_bounds in product((digest, among_several(digest)), bounds):
            contents[media_bounds.stored_digest(ref.kind, form)] = content
    return contents
