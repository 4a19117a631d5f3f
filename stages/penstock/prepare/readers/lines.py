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
            places = range(number, number + len(lines))
            number += len(lines)
            if any(map(bytes.isspace, lines)):
                kept = [i for i, line in enumerate(lines) if not line.isspace()]
                yield Chunk([lines[i] for i in kept], [places[i] for i in kept], _parse_lines)
            else:
                yield Chunk(lines, places, _parse_lines)


def text_lines(file: SourceFile, span: Span | None) -> Iterator[Chunk]:
    """The lines of a text file, each as `{"text": …}`."""
    with file.open() as stream:
        number = 1
        for lines in _iter_line_batches(stream, file, span):
            if number == 1 and not (span and span[0]):
                lines[0] = lines[0].removeprefix(BOM)
            yield Chunk(lines, range(number, number + len(lines)), _parse_texts)
            number += len(lines)


def parse_line(line: bytes) -> Value:
    """Parse one JSON line."""
    try:
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


def count_lines_before(file: SourceFile, at: int) -> int:
    """Number of lines before the first one that starts at or after byte `at`."""
    with file.open() as stream:
        left, found = line_start(stream, at), 0
        stream.seek(0)
        while left and (block := stream.read(min(BLOCK, left))):
            found += block.count(b"\n")
            left -= len(block)
        return found


def line_start(stream: BinaryIO, at: int) -> int:
    """Offset of the first line that starts at or after `at`, or the end of the file."""
    if not at:
        return 0
    stream.seek(at - 1)
    while block := stream.readline(BLOCK):
        at += len(block)
        if block.endswith(b"\n"):
            break
    return at - 1


def _iter_line_batches(
    stream: BinaryIO, file: SourceFile, span: Span | None
) -> Iterator[list[bytes]]:
    """Yield lists of at most `BATCH` lines, with line ends. The grouping depends on content
    only. Raises StageError for a line that is too large."""
    at, stop = (line_start(stream, span[0]), span[1]) if span else (0, None)
    if at:
        stream.seek(at)
    while stop is None or at < stop:
        wanted = BATCH_BYTES if stop is None else min(BATCH_BYTES, stop - at)
        block = stream.read(wanted)
        if not block:
            return
        if not block.endswith(b"\n"):
            block += stream.readline(file.max_record_bytes + 1)
        lines = io.BytesIO(block).readlines()
        if len(block) > file.max_record_bytes and (
            large := next((line for line in lines if len(line) > file.max_record_bytes), None)
        ):
            raise file.too_large(f"the line at byte {at + block.index(large) + 1:,}")
        at += len(block)
        yield from (lines[first : first + BATCH] for first in range(0, len(lines), BATCH))


def _parse_lines(lines: list[bytes]) -> list[Value]:
    return [parse_line(line) for line in lines]


def _parse_texts(lines: list[bytes]) -> list[Value]:
    return [_parse_text(line) for line in lines]


def _parse_text(line: bytes) -> Value:
    try:
        return {"text": line.rstrip(b"\r\n").decode()}
    except UnicodeDecodeError as error:
        return BadRecord("bad_value", utf8_error(error))


def utf8_error(error: UnicodeDecodeError) -> str:
    """Error message for a line that is not UTF-8."""
    return f"not UTF-8: {error.reason} at byte {error.start + 1}; save the file as UTF-8"


def _explain_json_error(line: bytes, error: json.JSONDecodeError) -> str:
    """Error message for a line that is not JSON; common mistakes are named."""
    text = line.decode(errors="replace").rstrip()
    rest = text[error.pos :].lstrip() if error.msg == "Extra data" else None
    location = f"at column {error.colno}"
    if rest == ",":
        return (
            f"not JSON: a comma {location}, after the record; lines of JSON have none between them"
        )
    if rest is not None and rest.startswith("{"):
        return f"not JSON: a second record {location}; write one to a line"
    # Python 3.13 reports the position of the comma, others that of the bracket.
    trailing = TRAILING_COMMA.match(text, error.pos)
    if trailing and (trailing[1] or text[: error.pos].rstrip().endswith(",")):
        at = trailing.start(2) + 1
        return f"not JSON: a comma before {trailing[2]} at column {at}; take it out"
    if COMMENT.match(text, error.pos):
        return f"not JSON: a comment {location}, which JSON does not have; take it out"
    if "'" in text[error.pos : error.pos + 1]:
        return f"not JSON: single quotes {location}; JSON has double ones"
    if error.msg.startswith("Invalid control character"):
        return (
            f"not JSON: a line break, tab or null byte {location}; within quotes write \\n or \\t"
        )
    return f"not JSON: {error.msg.removesuffix(' at')} {location}"
