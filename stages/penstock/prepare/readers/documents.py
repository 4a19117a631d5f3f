"""Read files that cannot be split: JSON documents and CSV."""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, TextIO

from penstock.core.errors import StageError
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.readers.decompress import SourceFile
from penstock.prepare.readers.lines import COMMENT
from penstock.prepare.readers.records import (
    BATCH,
    BATCH_BYTES,
    JSON,
    Chunk,
    DuplicateKeyError,
    Value,
    as_object,
)

DELIMITERS = (";", "\t", "|")
"""Delimiters tried for CSV files whose header has no comma."""

LONGEST_NAME = 64
"""Characters of a name in the first line of a CSV file, above which it is taken for data."""

RECORD_LISTS = ("data", "train", "rows", "records", "examples", "samples", "instances", "items")
"""Members of an object that hold all records of a document."""

CHUNK = 1 << 20
"""Characters read from a JSON document at once."""


def json_document(file: SourceFile) -> Iterator[Chunk]:
    """Read an array of objects, concatenated objects, or an object with an array of all records.

    Arrays and concatenated objects are read incrementally. Raises StageError if the document is
    truncated or is not JSON.
    """
    with file.open() as raw:
        # -sig: json refuses a byte order mark, with which some editors begin a file.
        stream = io.TextIOWrapper(raw, encoding="utf-8-sig")
        reader = _JsonReader(stream, file)
        is_array = reader.peek() == "["
        if is_array:
            reader.skip()
        values = _iter_values(reader, is_array)
        yield from group_items(values, lambda values: [as_object(value) for value in values])
        if not is_array:
            return
        if not reader.peek():
            raise StageError(
                f"{file.name} ends at line {reader.line} with an unclosed array.\n"
                "  It is truncated: write the file again."
            )
        reader.skip()
        if reader.peek():
            raise StageError(
                f"{file.name}:{reader.line}: there is more after the array of records.\n"
                "  Write all records into one array, or one record to a line (.jsonl)."
            )


def record_list(value: Any) -> list[Any] | None:
    """All records of a document that is one object: its only list of objects that are no messages,
    under a usual name; None for any other value."""
    if not isinstance(value, dict):
        return None
    lists = {
        name: part
        for name, part in value.items()
        if isinstance(part, list) and part and isinstance(part[0], dict)
    }
    [name, *more] = lists or [""]
    if more or name not in RECORD_LISTS or {"role", "from"} & lists[name][0].keys():
        return None
    return lists[name]


def csv_rows(file: SourceFile) -> Iterator[Chunk]:
    """Read the rows of a CSV file with a header, as objects of strings.

    Raises StageError if it is not CSV.
    """
    # The process has one limit, 131,072 characters unless it is set.
    csv.field_size_limit(file.max_record_bytes)
    with file.open() as raw:
        # With newline="", line ends within quotes stay as they are in the file.
        stream = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        lines = _iter_text_lines(stream, file)
        # strict: else a quote that is never closed makes one field of the rest of the file.
        reader = csv.reader(lines, strict=True, delimiter=detect_delimiter(file))
        try:
            header = next(reader, None)
            if header is None:
                return
            names = Counter(filter(None, header))
            if twice := next((name for name, count in names.items() if count > 1), None):
                raise StageError(
                    f"{file.name} has two columns named {twice!r}.\n"
                    "  Rename one of them in its first line."
                )
            if data := next(filter(_is_data, header), None):
                raise StageError(
                    f"{file.name} has no header: its first line has {data[:40]!r}, which names no "
                    "column.\n  Write the names of the columns into its first line."
                )
            # `if row`: of a blank line, csv.reader makes an empty list.
            rows = ((reader.line_num, row, sum(map(len, row))) for row in reader if row)
            yield from group_items(rows, lambda rows: [_parse_row(header, row) for row in rows])
        except (csv.Error, UnicodeDecodeError) as error:
            raise StageError(
                f"{file.name}:{reader.line_num}: not CSV: {error}.\n  Correct it there, in UTF-8."
            ) from error


def _iter_text_lines(stream: TextIO, file: SourceFile) -> Iterator[str]:
    number = 1
    # csv.field_size_limit is for fields: csv.reader is given a whole line, however long, before.
    while line := stream.readline(file.max_record_bytes + 1):
        if len(line) > file.max_record_bytes:
            raise file.too_large(f"line {number:,}")
        yield line
        number += 1


def _is_data(name: str) -> bool:
    """Whether a field of the first line is no name of a column."""
    return len(name) > LONGEST_NAME or "\n" in name or name.lstrip().startswith(("[", "{"))


def detect_delimiter(file: SourceFile) -> str:
    """The delimiter of a CSV file: a comma, unless its header has none and contains another common
    delimiter."""
    with file.open() as raw:
        head = raw.readline(CHUNK).decode("utf-8-sig", errors="replace")
    best = max(DELIMITERS, key=head.count)
    return best if best in head and "," not in head else ","


def group_items(documents: Iterator[tuple[int, Any, int]], parse: Any) -> Iterator[Chunk]:
    """Group (position, item, size) into chunks of at most `BATCH` items and about `BATCH_BYTES`."""
    items: list[Any] = []
    offsets: list[int] = []
    size = 0
    for offset, item, its_size in documents:
        items.append(item)
        offsets.append(offset)
        size += its_size
        if len(items) == BATCH or size >= BATCH_BYTES:
            yield Chunk(items, offsets, parse)
            items, offsets, size = [], [], 0
    if items:
        yield Chunk(items, offsets, parse)


def _parse_row(header: list[str], fields: list[str]) -> Value:
    if len(fields) == len(header):
        return dict(zip(header, fields, strict=True))
    return BadRecord("wrong_type", f"{len(fields)} fields where the header has {len(header)}")


def _iter_values(reader: "_JsonReader", is_array: bool) -> Iterator[tuple[int, Any, int]]:
    while (character := reader.peek()) and not (is_array and character == "]"):
        if character == ",":
            reader.skip()
            continue
        line, start = reader.line, reader.read
        value = reader.value()
        size = reader.read - start
        records = record_list(value) if not (is_array or start or reader.peek()) else None
        if records is None:
            yield line, value, size
        else:
            yield from ((line, record, size // len(records)) for record in records)


class _JsonReader:
    """JSON values from a text stream, read a chunk at a time."""

    def __init__(self, stream: TextIO, file: SourceFile) -> None:
        self._stream = stream
        self._file = file
        self._name = file.name
        self._text = ""
        self._at = 0
        self.line = 1
        self.read = 0
        """Number of characters of all values read so far."""

    def peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            while self._at < len(self._text):
                character = self._text[self._at]
                if not character.isspace():
                    return character
                self.skip()
            if not self._refill():
                return ""

    def skip(self) -> None:
        self.line += self._text[self._at] == "\n"
        self._at += 1

    def value(self) -> Any:
        """Read the next value. Raises StageError if the text is not JSON."""
        while True:
            start = self._at
            try:
                value, end = JSON.raw_decode(self._text, start)
            except DuplicateKeyError as error:
                location = f"{self._name}:{self.line}"
                raise StageError(f"{location}: the record that begins here: {error}.") from error
            except (ValueError, RecursionError) as error:
                # It may only be cut off by the end of what was read so far.
                if self._refill():
                    continue
                line, why = self.line, "nested too deeply"
                if isinstance(error, json.JSONDecodeError):
                    position = error.pos - start  # the rest of the text begins at `start` now
                    line += self._text.count("\n", 0, position)
                    is_comment = COMMENT.match(self._text, position)
                    why = "a comment, which JSON does not have" if is_comment else error.msg
                elif isinstance(error, ValueError):
                    why = str(error)
                raise StageError(
                    f"{self._name}:{line}: not JSON: {why}.\n"
                    "  Correct it there, or write the records as JSON lines (.jsonl), where "
                    "an error affects one record only."
                ) from error
            self.line += self._text.count("\n", self._at, end)
            self.read += end - self._at
            self._at = end
            return value

    def _refill(self) -> bool:
        unread = self._text[self._at :]
        if len(unread) > self._file.max_record_bytes:
            raise self._file.too_large(f"the value at line {self.line:,}")
        try:
            # A value is decoded anew after each read: as reads double the text, all attempts cost
            # about twice the last.
            more = self._stream.read(max(CHUNK, len(unread)))
        except UnicodeDecodeError as error:
            raise StageError(
                f"{self._name} is not UTF-8 after line {self.line}: {error.reason}.\n"
                "  Write the file in UTF-8."
            ) from error
        self._text, self._at = unread + more, 0
        return bool(more)
