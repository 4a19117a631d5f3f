"""The records of a slice, in runs: read from its pieces, and chosen from what they hold."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

from penstock.prepare.readers.file_splits import Piece
from penstock.prepare.readers.lines import lines_before
from penstock.prepare.readers.records import Batch, Chunk
from penstock.prepare.readers.registry import chunks, records_in
from penstock.prepare.slices import Slice

HAVE_LINES = ("json_lines", "text_lines", "csv", "json_document")
"""Readers of files in which people look for a line."""


def records(item: Slice, token: bool | None = None) -> Iterator[Batch]:
    """The slice's records in the order of its source.

    Raises StageError where a file breaks off; CapabilityError where the hub, asked with `token`
    (None: its login if there is one), cannot be reached.
    """
    seen = 0
    for piece in item.pieces:
        before = cache(partial(count_records_before, piece, token))
        number, has_lines = piece.start + 1, piece.reader in HAVE_LINES
        for chunk in _within(chunks(piece, token), piece.start, piece.stop):
            first = (item.first - seen) % item.step
            seen += len(chunk)
            chosen = chunk.part(first, None, item.step) if item.step > 1 else chunk
            numbers = None
            if piece.reader == "json_document":
                numbers = range(number + first, number + len(chunk), item.step)
            number += len(chunk)
            if len(chosen):
                yield Batch(piece.name, chosen.values(), chosen.places, before, numbers, has_lines)


def _within(found: Iterator[Chunk], start: int, stop: int | None) -> Iterator[Chunk]:
    """Records `start` to `stop` of all; what comes after them is not read."""
    at = 0
    for chunk in found:
        first, last = max(start - at, 0), len(chunk) if stop is None else min(stop - at, len(chunk))
        at += len(chunk)
        if first < last:
            yield chunk if (first, last) == (0, len(chunk)) else chunk.part(first, last)
        if stop is not None and at >= stop:
            return


def count_records_before(piece: Piece, token: bool | None) -> int:
    """Lines or rows ahead of the piece in its file, read where the plan did not tell."""
    if piece.before is not None:
        return piece.before
    assert piece.span
    if piece.reader in ("json_lines", "text_lines"):
        assert piece.file
        return lines_before(piece.file, piece.span[0])
    ahead = replace(piece, span=(0, piece.span[0]))
    return records_in(ahead, token)
