"""Read line-based files: JSON lines and plain text.

A piece of a file is a byte range; it contains the lines that start in the range.
"""

import io
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from penstock.prepare.bad_records import BadRecord
from penstock.prepare.readers.decompress import SourceFile
from penstock.prepare.readers.records import (
    BATCH,
    BATCH_BYTES,
    JSON,
    Chunk,
    DuplicateKeyError,
    Value,
    as_object,
)

BOM = b"\xef\xbb\xbf"
BLOCK = 1 << 20
TRAILING_COMMA = re.compile(r"(,?)\s*([]}])")
COMMENT = re.compile(r"//|/\*|#")
Span = tuple[int, int]
"""[start, stop) in bytes."""


def json_lines(file: SourceFile, span: Span | None) -> Iterator[Chunk]:
    """Read the objects of a JSON lines file; blank lines are skipped."""
    with file.open() as stream:
        number = 1
        for lines in _iter_line_batches(stream, file, span):
            numbers = range(number, number + len(lines))
            number += len(lines)
            if any(map(bytes.isspace, lines)):
                nonblank = [i for i, line in enumerate(lines) if not line.isspace()]
                yield Chunk(
                    [lines[i] for i in nonblank], [numbers[i] for i in nonblank], _parse_lines
                )
            else:
                yield Chunk(lines, numbers, _parse_lines)


def text_lines(file: SourceFile, span: Span | None) -> Iterator[Chunk]:
    """The lines of a text file, each as `{"text": …}`."""
    with file.open() as stream:
        number = 1
        for lines in _iter_line_batches(stream, file, span):
            if number == 1 and not (span and span[0]):
                # Only at the beginning of a file: elsewhere the same bytes are text.
                lines[0] = lines[0].removeprefix(BOM)
            yield Chunk(lines, range(number, number + len(lines)), _parse_texts)
            number += len(lines)


def parse_line(line: bytes) -> Value:
    """Parse one JSON line."""
    try:
        # As `json.loads` decodes bytes.
        value = JSON.decode(line.decode(json.detect_encoding(line), "surrogatepass"))
    except RecursionError:
        return BadRecord("invalid_json", "not JSON: nested too deeply")
    except DuplicateKeyError as error:
        return BadRecord("invalid_json", str(error))
    except UnicodeDecodeError as error:
        return BadRecord("invalid_json", utf8_error(error))
    except json.JSONDecodeError as error:
        return BadRecord("invalid_json", _explain_json_error(line, error))
    except ValueError as error:  # a number of thousands of digits
        return BadRecord("invalid_json", f"not JSON: {error}")
    return as_object(value)


def count_lines_before(file: SourceFile, offset: int) -> int:
    """Number of lines before the first one that starts at or after byte `offset`."""
    with file.open() as stream:
        remaining, count = line_start(stream, offset), 0
        stream.seek(0)
        while remaining and (block := stream.read(min(BLOCK, remaining))):
            count += block.count(b"\n")
            remaining -= len(block)
        return count


def line_start(stream: BinaryIO, offset: int) -> int:
    """Offset of the first line that starts at or after `offset`, or the end of the file."""
    if not offset:
        return 0
    # From the byte before: if it ends a line, the next one starts at `offset` itself.
    stream.seek(offset - 1)
    # A file without line ends is one line, which a plain readline would hold whole.
    while block := stream.readline(BLOCK):
        offset += len(block)
        if block.endswith(b"\n"):
            break
    return offset - 1


def _iter_line_batches(
    stream: BinaryIO, file: SourceFile, span: Span | None
) -> Iterator[list[bytes]]:
    """Yield lists of at most `BATCH` lines, with line ends. The grouping depends on content
    only. Raises StageError for a line that is too large."""
    position, stop = (line_start(stream, span[0]), span[1]) if span else (0, None)
    if position:
        stream.seek(position)
    while stop is None or position < stop:
        num_bytes = BATCH_BYTES if stop is None else min(BATCH_BYTES, stop - position)
        block = stream.read(num_bytes)
        if not block:
            return
        if not block.endswith(b"\n"):
            # One byte more than is allowed: a longer line is seen to be too long, and not read to
            # its end.
            block += stream.readline(file.max_record_bytes + 1)
        # Not splitlines, which also ends a line at a carriage return.
        lines = io.BytesIO(block).readlines()
        if len(block) > file.max_record_bytes and (
            large := next((line for line in lines if len(line) > file.max_record_bytes), None)
        ):
            raise file.too_large(f"the line at byte {position + block.index(large) + 1:,}")
        position += len(block)
        yield from (lines[first : first + BATCH] for first in range(0, len(lines), BATCH))


def _parse_lines(lines: list[bytes]) -> list[Value]:
    return [parse_line(line) for line in lines]


def _parse_texts(lines: list[bytes]) -> list[Value]:
    values: list[Value] = []
    for line in lines:
        try:
            values.append({"text": line.rstrip(b"\r\n").decode()})
        except UnicodeDecodeError as error:
            values.append(BadRecord("bad_value", utf8_error(error)))
    return values


def utf8_error(error: UnicodeDecodeError) -> str:
    """Error message for a line that is not UTF-8."""
    return f"not UTF-8: {error.reason} at byte {error.start + 1}; save the file as UTF-8"


def _explain_json_error(line: bytes, error: json.JSONDecodeError) -> str:
    text = line.decode(errors="replace").rstrip()
    remainder = text[error.pos :].lstrip() if error.msg == "Extra data" else None
    location = f"at column {error.colno}"
    if remainder == ",":
        return (
            f"not JSON: a comma {location}, after the record; lines of JSON have none between them"
        )
    if remainder is not None and remainder.startswith("{"):
        return f"not JSON: a second record {location}; write one to a line"
    # Python 3.13 reports the position of the comma, others that of the bracket.
    trailing = TRAILING_COMMA.match(text, error.pos)
    if trailing and (trailing[1] or text[: error.pos].rstrip().endswith(",")):
        column = trailing.start(2) + 1
        return f"not JSON: a comma before {trailing[2]} at column {column}; take it out"
    if COMMENT.match(text, error.pos):
        return f"not JSON: a comment {location}, which JSON does not have; take it out"
    if "'" in text[error.pos : error.pos + 1]:
        return f"not JSON: single quotes {location}; JSON has double ones"
    if error.msg.startswith("Invalid control character"):
        return (
            f"not JSON: a line break, tab or null byte {location}; within quotes write \\n or \\t"
        )
    return f"not JSON: {error.msg.removesuffix(' at')} {location}"
