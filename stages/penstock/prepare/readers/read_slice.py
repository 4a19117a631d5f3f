"""Read the records of a slice from its pieces."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

from penstock.prepare.readers.file_splits import FileSplit
from penstock.prepare.readers.image_pins import image_root
from penstock.prepare.readers.lines import count_lines_before
from penstock.prepare.readers.records import Batch, Chunk
from penstock.prepare.readers.registry import count_records, read_chunks
from penstock.prepare.slices import Slice

LINE_READERS = ("json_lines", "text_lines", "csv", "json_document")
"""Readers of files with line numbers."""


def read_records(item: Slice, token: bool | None = None) -> Iterator[Batch]:
    """Yield the slice's records in the order of its source.

    `token`: whether the Hugging Face login is used (None: if there is one). Raises StageError if a
    file is truncated, CapabilityError if the hub cannot be reached.
    """
    num_read = 0
    for piece in item.pieces:
        before = cache(partial(count_records_before, piece, token))
        number, has_lines = piece.start + 1, piece.reader in LINE_READERS
        for chunk in _limit_chunks(read_chunks(piece, token), piece.start, piece.stop):
            # The stride goes on over chunks and pieces, whose records are numbered together.
            first = (item.first - num_read) % item.step
            num_read += len(chunk)
            chosen = chunk.part(first, None, item.step) if item.step > 1 else chunk
            numbers = None
            if piece.reader == "json_document":
                numbers = range(number + first, number + len(chunk), item.step)
            number += len(chunk)
            if len(chosen):
                yield Batch(
                    piece.name,
                    chosen.values(),
                    chosen.positions,
                    before,
                    numbers,
                    has_lines,
                    image_root(piece, item.settings),
                )


def _limit_chunks(chunks: Iterator[Chunk], start: int, stop: int | None) -> Iterator[Chunk]:
    """Limit chunks to records `start` to `stop`; later chunks are not read."""
    offset = 0
    for chunk in chunks:
        first = max(start - offset, 0)
        last = len(chunk) if stop is None else min(stop - offset, len(chunk))
        offset += len(chunk)
        if first < last:
            yield chunk if (first, last) == (0, len(chunk)) else chunk.part(first, last)
        if stop is not None and offset >= stop:
            return


def count_records_before(piece: FileSplit, token: bool | None) -> int:
    """Number of lines or rows before the piece in its file; reads the file if not known."""
    if piece.records_before is not None:
        return piece.records_before
    assert piece.span
    if piece.reader in ("json_lines", "text_lines"):
        assert piece.file
        return count_lines_before(piece.file, piece.span[0])
    ahead = replace(piece, span=(0, piece.span[0]))
    return count_records(ahead, token)
