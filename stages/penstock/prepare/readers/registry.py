"""What a piece holds: every reader by its name."""

from collections.abc import Callable, Iterator
from itertools import islice

from penstock.core.cache.digests import derived
from penstock.core.cache.record import digest_json
from penstock.prepare.builtin import generate
from penstock.prepare.readers.columnar import arrow_file, arrow_stream, parquet
from penstock.prepare.readers.decompress import SourceFile
from penstock.prepare.readers.documents import csv_rows, json_document
from penstock.prepare.readers.file_splits import FORMAT, Piece, require_unchanged
from penstock.prepare.readers.lines import json_lines, text_lines
from penstock.prepare.readers.megatron import documents
from penstock.prepare.readers.records import BATCH, Chunk, Value


def chunks(piece: Piece, token: bool | None = None) -> Iterator[Chunk]:
    """All records of a piece, `start` and `stop` aside."""
    if piece.file and piece.reader in _IN_PARTS:
        return _IN_PARTS[piece.reader](piece.file, piece.span)
    if piece.file:
        return _WHOLE[piece.reader](piece.file)
    if piece.reader == "builtin":
        return _generated(piece.name)
    # The library takes a second to import, which all other sources are spared.
    from penstock.prepare.readers.hub import hub_rows, streamed_rows  # noqa: PLC0415

    assert piece.span
    rows = hub_rows if piece.reader == "hub" else streamed_rows
    return rows(piece.content, piece.span, token)


_IN_PARTS: dict[str, Callable[[SourceFile, tuple[int, int] | None], Iterator[Chunk]]] = {
    "json_lines": json_lines,
    "text_lines": text_lines,
    "parquet": parquet,
    "arrow_file": arrow_file,
    "megatron": documents,
}
_WHOLE: dict[str, Callable[[SourceFile], Iterator[Chunk]]] = {
    "json_document": json_document,
    "csv": csv_rows,
    "arrow_stream": arrow_stream,
}


def _generated(name: str) -> Iterator[Chunk]:
    values = iter(generate(name))
    first = 1
    while run := list(islice(values, BATCH)):
        yield Chunk(run, range(first, first + len(run)), _as_they_are)
        first += len(run)


def _as_they_are(values: list[Value]) -> list[Value]:
    return values


def records_in(piece: Piece, token: bool | None = None) -> int:
    """How many records a piece holds, counted once for each content; none of them is parsed."""

    def count() -> int:
        found = sum(len(chunk) for chunk in chunks(piece, token))
        require_unchanged([piece.file])
        return found

    return derived(digest_json([FORMAT, "records", piece.as_json()]), count)
