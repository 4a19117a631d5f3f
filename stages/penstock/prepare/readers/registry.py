"""Table of readers by name."""

from collections.abc import Callable, Iterator

from penstock.core.cache.digest_cache import cached_value
from penstock.core.cache.record import digest_json
from penstock.prepare.builtin import generate
from penstock.prepare.readers.archive import tar_records
from penstock.prepare.readers.columnar import arrow_file, arrow_stream, parquet
from penstock.prepare.readers.decompress import SourceFile
from penstock.prepare.readers.documents import csv_rows, json_document
from penstock.prepare.readers.file_splits import FORMAT, FileSplit, require_unchanged
from penstock.prepare.readers.image_folder import is_metadata, with_image_columns
from penstock.prepare.readers.lines import json_lines, text_lines
from penstock.prepare.readers.megatron import read_documents
from penstock.prepare.readers.records import Chunk, chunk_records


def read_chunks(piece: FileSplit, token: bool | None = None) -> Iterator[Chunk]:
    """Read all records of a piece, ignoring its `start` and `stop`."""
    chunks = _read_chunks(piece, token)
    return map(with_image_columns, chunks) if is_metadata(piece.name) else chunks


def _read_chunks(piece: FileSplit, token: bool | None) -> Iterator[Chunk]:
    if piece.file and piece.reader in _SPAN_READERS:
        return _SPAN_READERS[piece.reader](piece.file, piece.span)
    if piece.file:
        return _FILE_READERS[piece.reader](piece.file)
    if piece.reader == "builtin":
        return chunk_records(generate(piece.name))
    # `datasets` takes a second to import.
    from penstock.prepare.readers.hub import hub_rows, streamed_rows  # noqa: PLC0415

    assert piece.span
    rows = hub_rows if piece.reader == "hub" else streamed_rows
    return rows(piece.content, piece.span, token)


_SPAN_READERS: dict[str, Callable[[SourceFile, tuple[int, int] | None], Iterator[Chunk]]] = {
    "json_lines": json_lines,
    "text_lines": text_lines,
    "parquet": parquet,
    "arrow_file": arrow_file,
    "megatron": read_documents,
}
_FILE_READERS: dict[str, Callable[[SourceFile], Iterator[Chunk]]] = {
    "json_document": json_document,
    "csv": csv_rows,
    "tar": tar_records,
    "arrow_stream": arrow_stream,
}


def count_records(piece: FileSplit, token: bool | None = None) -> int:
    """Count the records of a piece without parsing them; cached by content."""

    def count() -> int:
        count = sum(len(chunk) for chunk in read_chunks(piece, token))
        # Before it is cached: under the digest of this content, the count of another would stay.
        require_unchanged([piece.file])
        return count

    return cached_value(digest_json([FORMAT, "records", piece.as_json()]), count)
