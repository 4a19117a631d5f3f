"""How a Parquet row group is read in bounded memory, from what its pages claim."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.config.schema.dataset import MAX_RECORD_BYTES
from penstock.core.errors import StageError
from penstock.prepare.readers.decompress import SourceFile, hold
from penstock.prepare.readers.expansion import Expansion
from penstock.prepare.readers.parquet_pages import (
    ColumnChunk,
    PageError,
    chunk_range,
    column_chunks,
)
from penstock.prepare.readers.records import BATCH, BATCH_BYTES
from penstock.prepare.readers.row_sizes import ROW_BYTES

# Entries of a list in the footer: columns, row groups. Arrow takes 2 KB for a column.
MAX_COLUMNS = 200_000

BATCH_MEMORY = 64 << 20
"""Bytes of the rows that Arrow decodes at once, apart from the pages that they are in."""

# Rows at once where texts are read as indices: each batch has the whole dictionary.
ROWS_OF_INDICES = 1 << 16


@dataclass(frozen=True)
class RowGroupPlan:
    """How a row group is read."""

    location: str
    num_rows: int
    rows_at_once: int
    dictionaries: list[str]
    """Columns that are read as indices of a dictionary, so that its texts are not repeated."""


def open_parquet(
    stream: Any, dictionaries: Sequence[str] = (), metadata: pq.FileMetaData | None = None
) -> pq.ParquetFile:
    """Open a file whose pages are read one at a time. Raises ArrowInvalid if its row groups do not
    have all its rows."""
    # pre_buffer would read all column chunks of a row group ahead; a buffer reads them piece by
    # piece.
    file = pq.ParquetFile(
        stream,
        metadata=metadata,
        read_dictionary=list(dictionaries),
        buffer_size=1 << 20,
        pre_buffer=False,
        # Arrow 26 allows a million: a footer of some MB would take 2 GB.
        thrift_container_size_limit=MAX_COLUMNS,
    )
    footer = file.metadata
    rows = sum(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
    if rows != footer.num_rows:
        raise pa.ArrowInvalid(f"its row groups have {rows:,} rows of {footer.num_rows:,}")
    return file


def plan_row_group(
    file: pq.ParquetFile,
    group: int,
    raw: BinaryIO,
    codecs: Sequence[int],
    source: SourceFile,
    expansion: Expansion,
) -> RowGroupPlan:
    """Raises StageError for pages or rows that are larger than allowed."""
    metadata, location = file.metadata.row_group(group), f"row group {group + 1:,}"
    expansion.check(metadata.num_rows * ROW_BYTES, f"rows in {location}")
    ranges = [chunk_range(metadata.column(i)) for i in range(metadata.num_columns)]
    # Before the page headers are read: of a remote file, each would be a request of its own.
    hold(raw, min(start for start, _ in ranges), max(stop for _, stop in ranges))
    bounds = _Bounds(raw, source, location)
    try:
        for column in column_chunks(file, group, raw, codecs):
            column.require_rows(metadata.num_rows)
            bounds.add(column)
            expansion.check(bounds.expanded, f"pages in {location}")
    except PageError as error:
        raise StageError(
            f"{source.name} is damaged in {location}: {error}\n  Write the file again."
        ) from error
    rows, most, num_bytes = max(1, metadata.num_rows), BATCH, BATCH_BYTES
    if bounds.dictionaries:
        most, num_bytes = ROWS_OF_INDICES, BATCH_MEMORY
    usual = num_bytes * rows // max(1, metadata.total_byte_size)
    bounded = int(BATCH_MEMORY / max(1, bounds.row_bytes))
    at_once = max(1, min(most, usual, bounded))
    return RowGroupPlan(location, metadata.num_rows, at_once, bounds.dictionaries)


class _Bounds:
    """Upper bounds of the memory of rows, column by column."""

    def __init__(self, raw: BinaryIO, source: SourceFile, location: str) -> None:
        self._raw = raw
        self._source = source
        self._location = location
        self._spare = float(BATCH_MEMORY)
        """Bytes that columns may take with all their rows at once."""
        self.row_bytes = 0.0
        """Of the largest row, without the columns that take little altogether."""
        self.expanded = 0
        """Bytes of all pages."""
        self.dictionaries: list[str] = []

    def add(self, column: ColumnChunk) -> None:
        """Raises StageError if a page or a row is too large."""
        self.expanded += column.expanded
        if self._is_too_large(max((page.expanded for page in column.pages), default=0)):
            raise self._too_large(f"a page of column {column.path}")
        value_bytes = column.value_bytes()
        text_bytes = self._text_bytes(column, value_bytes)
        if (total := column.num_values * max(value_bytes, text_bytes)) <= self._spare:
            self._spare -= total
            return
        length, num_bytes = column.longest_row(self._raw)
        if self._is_too_large(max(length * column.width, num_bytes)):
            raise self._too_large(f"a row of column {column.path}")
        if column.is_text and column.has_dictionary:
            is_mixed = any(not page.has_indices for page in column.data_pages)
            # A column in both encodings takes ten times as long as indices.
            if not is_mixed or length * text_bytes > BATCH_MEMORY:
                self.dictionaries.append(column.path)
                text_bytes = 0.0
        self.row_bytes += length * max(value_bytes, text_bytes)

    def _text_bytes(self, column: ColumnChunk, value_bytes: float) -> float:
        """Bytes of the longest text in a dictionary, or an upper bound that suffices."""
        if not column.has_dictionary:
            return 0.0
        largest = max((page.expanded for page in column.dictionary_pages), default=0)
        if column.num_values * max(value_bytes, largest) <= self._spare:
            return largest
        return column.longest_text(self._raw)

    def _is_too_large(self, num_bytes: int) -> bool:
        return num_bytes > max(self._source.max_record_bytes, MAX_RECORD_BYTES)

    def _too_large(self, part: str) -> StageError:
        return self._source.too_large(f"{part} in {self._location}")
