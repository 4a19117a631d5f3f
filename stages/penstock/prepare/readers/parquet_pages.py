"""What the page headers of a Parquet row group claim, before a page is decompressed.

A dictionary has a value once and rows refer to it; levels and indices are run-length encoded: a few
bytes stand for any number of rows. The format: https://parquet.apache.org/docs/file-format/.
"""

import io
import operator
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.prepare.readers.compact_protocol import CompactReader, Struct

FIRST_READ = 1 << 10
# Bytes of a page header, as in Arrow.
MAX_PAGE_HEADER = 16 << 20

# Repetition levels of one page that are decoded; of longer ones, all values may be of one row.
MAX_LEVEL_BYTES = 16 << 20

DATA, DICTIONARY, DATA_V2 = 0, 2, 3
"""Values of `PageType`."""

# Codecs by number; pages of others, such as that of Hadoop's LZ4, are not decompressed here.
CODECS = {0: "", 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}

# PLAIN_DICTIONARY, of version 1 of the format, and RLE_DICTIONARY.
DICTIONARY_ENCODINGS = (2, 8)
# DELTA_BYTE_ARRAY: values share prefixes.
PREFIX_ENCODING = 7
RLE = 3

WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}
"""Bytes of a value, by physical type."""

# Logical types whose dictionaries Arrow can keep.
TEXTS = ("NONE", "STRING", "JSON", "ENUM", "BSON")


class PageError(ValueError):
    """A page header cannot be read, or claims what no page has."""


@dataclass(frozen=True)
class Page:
    """A page of a column chunk."""

    kind: int
    start: int
    """Offset of its data in the file."""
    num_bytes: int
    """Compressed."""
    expanded: int
    """Bytes after decompression, which Arrow allocates."""
    num_values: int
    encoding: int
    levels: tuple[int, int]
    """Version 1: (encoding of repetition levels, 0). Version 2: (RLE, their bytes)."""

    @property
    def has_indices(self) -> bool:
        """Whether its values are indices of a dictionary."""
        return self.encoding in DICTIONARY_ENCODINGS


@dataclass(frozen=True)
class ColumnChunk:
    """A column of a row group, and its pages."""

    path: str
    type: str
    """Its physical type."""
    width: int
    """Bytes of a value in memory, apart from those of texts."""
    is_text: bool
    """Whether it is read as texts or bytes."""
    max_repetition: int
    codec: str | None
    num_values: int
    """Values of all rows, as the footer says."""
    pages: list[Page]

    @property
    def data_pages(self) -> list[Page]:
        """The pages with values."""
        return [page for page in self.pages if page.kind != DICTIONARY]

    def require_rows(self, num_rows: int) -> None:
        """Raise PageError if the pages do not have the values of the footer, or of these rows."""
        values = sum(page.num_values for page in self.data_pages)
        if values != self.num_values or (not self.max_repetition and values != num_rows):
            raise PageError(
                f"column {self.path}: {values:,} values in its pages, where the footer has "
                f"{self.num_values:,} in {num_rows:,} rows"
            )

    @property
    def expanded(self) -> int:
        """Bytes of all pages after decompression."""
        return sum(page.expanded for page in self.pages)

    @property
    def dictionary_pages(self) -> list[Page]:
        """The page with the distinct values, if there is one."""
        return [page for page in self.pages if page.kind == DICTIONARY]

    @property
    def has_dictionary(self) -> bool:
        """Whether texts are in a dictionary."""
        return self.type == "BYTE_ARRAY" and any(page.has_indices for page in self.data_pages)

    def value_bytes(self) -> float:
        """An upper bound of the bytes of a value in memory, on average over any page, apart from
        texts in a dictionary."""
        values = [float(self.width)]
        for page in self.data_pages:
            if page.encoding == PREFIX_ENCODING:
                values.append(page.expanded)
            elif not page.has_indices:
                values.append(page.expanded / max(1, page.num_values))
        return max(values)

    def longest_text(self, stream: BinaryIO) -> int:
        """Bytes of the longest text in the dictionary."""
        if (codec := self.codec) is None:
            return max((page.expanded for page in self.dictionary_pages), default=0)
        contents = (_content(stream, page, codec) for page in self.dictionary_pages)
        return max(map(_longest_text, contents), default=0)

    def longest_row(self, stream: BinaryIO) -> tuple[int, int]:
        """(upper bound of the values of a row, bytes of the most pages that are within one row)."""
        if not self.max_repetition:
            return 1, 0
        longest = length = most_bytes = num_bytes = 0
        for page in self.data_pages:
            starts = _row_starts(stream, page, self.max_repetition, self.codec)
            if starts is None:
                length, num_bytes = length + page.num_values, num_bytes + page.expanded
            else:
                longest = max(longest, length + starts.first, starts.longest)
                length, num_bytes = page.num_values - starts.last, 0
            most_bytes = max(most_bytes, num_bytes)
        return max(longest, length), most_bytes


def column_chunks(
    file: pq.ParquetFile, group: int, stream: BinaryIO, codecs: Sequence[int]
) -> Iterator[ColumnChunk]:
    """The columns of a row group, with their codecs. Raises PageError with the column."""
    metadata = file.metadata.row_group(group)
    for number in range(metadata.num_columns):
        chunk, column = metadata.column(number), file.schema.column(number)
        width = column.length if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else None
        try:
            yield ColumnChunk(
                column.path,
                column.physical_type,
                WIDTHS.get(column.physical_type, 4) if width is None else width,
                column.logical_type.type in TEXTS,
                column.max_repetition_level,
                CODECS.get(codecs[number]),
                chunk.num_values,
                list(_iter_pages(stream, chunk)),
            )
        except PageError as error:
            raise PageError(f"column {column.path}: {error}") from error


def read_checked_codecs(stream: BinaryIO, file: pq.ParquetFile) -> list[list[int]]:
    """The codec of each column of each row group. Raises PageError for a footer that Arrow would
    end the process at, or reads otherwise."""
    # A file ends with the footer, its length and "PAR1". FileMetaData: 4 is the row groups.
    # RowGroup: 1 is its columns. ColumnChunk: 3 is its metadata. ColumnMetaData: 4 is its codec.
    stream.seek(-8, io.SEEK_END)
    length = int.from_bytes(stream.read(4), "little")
    stream.seek(-8 - length, io.SEEK_END)
    schema = [file.schema.column(number) for number in range(len(file.schema))]
    try:
        groups = CompactReader(stream.read(length)).struct()[4]
        codecs: list[list[int]] = []
        for _, group in zip(range(file.num_row_groups), groups, strict=True):
            chunks = [chunk[3] for chunk in group[1]]
            for metadata, column in zip(chunks, schema, strict=True):
                _check_size_statistics(metadata, column)
            codecs.append([operator.index(metadata[4]) for metadata in chunks])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise PageError("the footer is damaged") from error
    return codecs


def _check_size_statistics(metadata: Struct, column: pq.ColumnSchema) -> None:
    """Raise ValueError if they do not fit the column: `pq.RowGroupMetaData.column` does not catch
    what Arrow throws then."""
    # ColumnMetaData: 16 is SizeStatistics. 1 is the bytes of its texts, 2 and 3 are histograms of
    # repetition and definition levels.
    statistics = metadata.get(16, {})
    levels = (column.max_repetition_level + 1, column.max_definition_level + 1)
    fits = all(
        statistics.get(field, 0) in (0, count) for field, count in zip((2, 3), levels, strict=True)
    )
    if not fits or (1 in statistics and column.physical_type != "BYTE_ARRAY"):
        raise ValueError("its size statistics are not of the column")


def chunk_range(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """[start, stop) of a column chunk in the file."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < (offset := chunk.dictionary_page_offset or 0) < start:
        start = offset
    return start, start + chunk.total_compressed_size


def _iter_pages(stream: BinaryIO, chunk: pq.ColumnChunkMetaData) -> Iterator[Page]:
    offset, stop = chunk_range(chunk)
    num_values = 0
    while num_values < chunk.num_values and offset < stop:
        header, length = _read_header(stream, offset)
        page = _page(header, offset + length)
        yield page
        num_values += 0 if page.kind == DICTIONARY else page.num_values
        offset = page.start + page.num_bytes


def _read_header(stream: BinaryIO, offset: int) -> tuple[Struct, int]:
    size = FIRST_READ
    while True:
        stream.seek(offset)
        content = stream.read(size)
        compact = CompactReader(content)
        try:
            return compact.struct(), compact.at
        except IndexError as error:
            if len(content) < size or size >= MAX_PAGE_HEADER:
                raise PageError(f"the page header at byte {offset} is truncated") from error
        except (ValueError, TypeError) as error:
            raise PageError(f"the page header at byte {offset} is damaged") from error
        size *= 8


def _page(header: Struct, start: int) -> Page:
    # PageHeader: 1 is the type, 2 the bytes after decompression, 3 those in the file; 5, 7 and 8
    # are the headers of the types. In theirs 1 is the values; then 2 is the encoding and 4 that of
    # repetition levels, and in version 2 4 is the encoding and 6 the bytes of those levels.
    kind = header.get(1)
    kind = kind if isinstance(kind, int) else -1
    fields = header.get({DATA: 5, DICTIONARY: 7, DATA_V2: 8}.get(kind, 0))
    values: Struct = fields if isinstance(fields, dict) else {}
    is_v2 = kind == DATA_V2
    encoding = values.get(4 if is_v2 else 2, 0)
    levels = (RLE, values.get(6, 0)) if is_v2 else (values.get(4, RLE), 0)
    sizes = (header.get(3), header.get(2), values.get(1, 0))
    numbers = (kind, *sizes, encoding, *levels)
    # All have 32 bits in the format, and `CompactReader` reads numbers of 64.
    if not all(isinstance(number, int) and 0 <= number < 1 << 31 for number in numbers):
        raise PageError(f"the page header before byte {start} is damaged")
    num_bytes, expanded, num_values = cast("tuple[int, int, int]", sizes)
    return Page(kind, start, num_bytes, expanded, num_values, encoding, levels)


def _content(stream: BinaryIO, page: Page, codec: str) -> bytes:
    stream.seek(page.start)
    content = stream.read(page.num_bytes)
    if not codec:
        return content
    try:
        return pa.Codec(codec).decompress(content, page.expanded, asbytes=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise PageError(f"the page at byte {page.start} cannot be decompressed: {error}") from error


def _longest_text(dictionary: bytes) -> int:
    """Bytes of the longest text of a dictionary, whose texts follow their lengths of 32 bits."""
    longest = offset = 0
    while offset + 4 <= len(dictionary):
        (length,) = struct.unpack_from("<I", dictionary, offset)
        longest = max(longest, length)
        offset += 4 + length
    return longest


@dataclass
class _RowStarts:
    """Where rows begin in a page, as indices of values."""

    first: int
    last: int
    longest: int = 1
    """Values of the longest row that ends in the page."""

    def add(self, first: int, last: int, longest: int = 1) -> None:
        self.longest = max(self.longest, first - self.last, longest)
        self.last = last


def _row_starts(
    stream: BinaryIO, page: Page, max_level: int, codec: str | None
) -> _RowStarts | None:
    """Where rows begin, as far as it is known; None if nowhere."""
    encoding, num_bytes = page.levels
    # Version 2 has its levels before the values, never compressed.
    if page.kind == DATA_V2:
        stream.seek(page.start)
        levels = stream.read(min(num_bytes, MAX_LEVEL_BYTES))
    elif encoding == RLE and codec is not None:
        # Version 1 compresses them with the values, behind their length of 32 bits.
        content = _content(stream, page, codec)
        num_bytes = int.from_bytes(content[:4], "little")
        levels = content[4 : 4 + min(num_bytes, MAX_LEVEL_BYTES)]
    else:
        # BIT_PACKED levels, which the format deprecates, or a codec that is not known here.
        return None
    return _zeros(levels, max_level.bit_length(), page.num_values)


def _zeros(content: bytes, width: int, num_values: int) -> _RowStarts | None:
    """Zeros among the first `num_values` levels, which are runs and packed groups of eight."""
    starts: _RowStarts | None = None
    compact, position = CompactReader(content), 0
    while position < num_values and compact.at < len(content):
        header = compact.varint()
        count = min(header >> 1, num_values - position)
        # An odd header counts groups of eight packed levels, an even one repeats the level after
        # it.
        if header & 1:
            packed = np.frombuffer(content, np.uint8, offset=compact.at)
            packed = packed[: (header >> 1) * width]
            compact.at += len(packed)
            bits = np.unpackbits(packed, bitorder="little")
            count = min(len(bits) // width, num_values - position)
            levels = bits[: count * width].reshape(count, width).any(axis=1)
            zeros = np.flatnonzero(~levels)
            span = (position + int(zeros[0]), position + int(zeros[-1])) if len(zeros) else None
            longest = int(np.diff(zeros).max(initial=1))
        else:
            level = content[compact.at : compact.at + (width + 7) // 8]
            compact.at += len(level)
            span = (position, position + count - 1) if count and not any(level) else None
            longest = 1
        position += count
        if span and starts:
            starts.add(*span, longest)
        elif span:
            starts = _RowStarts(*span, longest)
    return starts
