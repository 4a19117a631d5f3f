"""What the messages of an Arrow IPC file or stream claim, before a record batch is decoded.

Compressed buffers begin with the size that Arrow allocates for them. The format:
https://arrow.apache.org/docs/format/Columnar.html, in flatbuffers.
"""

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

from penstock.config.schema.dataset import MAX_RECORD_BYTES
from penstock.core.errors import StageError
from penstock.prepare.readers.decompress import hold
from penstock.prepare.readers.expansion import Expansion
from penstock.prepare.readers.row_sizes import ROW_BYTES

# Bytes of a message without its body, and of a footer: of some 200,000 columns or batches.
MAX_METADATA = 16 << 20

# Bytes of a compressed record batch, which Arrow decompresses whole.
MAX_BATCH = 4 * MAX_RECORD_BYTES

TRAILER = struct.Struct("<i6s")
"""Length of the footer, and the magic bytes at the end of a file."""

BLOCK = struct.Struct("<qi4xq")
"""Offset of a message, length of its metadata, length of its body."""

PAIR = struct.Struct("<qq")
CONTINUATION = b"\xff\xff\xff\xff"
DICTIONARY_BATCH, RECORD_BATCH = 2, 3
"""Types of messages."""

Block = tuple[int, int, int]


def check_footer(raw: BinaryIO, expansion: Expansion) -> list[Block]:
    """The record batches of a file. Raises StageError for damage, or a dictionary that is too
    large."""
    try:
        size = raw.seek(0, 2)
        raw.seek(size - TRAILER.size)
        length, _ = TRAILER.unpack(raw.read(TRAILER.size))
        raw.seek(max(0, size - TRAILER.size - length))
        footer = _read_table(raw, length)
        # Footer: 2 is its dictionaries, 3 its record batches.
        dictionaries, batches = (footer.structs(field, BLOCK) for field in (2, 3))
    except (struct.error, ValueError, OSError) as error:
        raise _damaged(expansion, f"its footer cannot be read ({error})") from error
    for block in dictionaries:
        check_message(raw, block, expansion)
    return batches


def check_message(raw: BinaryIO, block: Block, expansion: Expansion) -> None:
    """Raise StageError if a message of a file is damaged or claims too much."""
    offset, num_bytes, body = block
    end = offset + num_bytes + body
    if min(block) < 0 or end > (expansion.file_bytes or end):
        raise _damaged(expansion, f"a message would be {num_bytes + body:,} bytes at {offset:,}")
    hold(raw, offset, end)
    metadata = _read_metadata(raw, offset, expansion)
    if metadata is None:
        raise _damaged(expansion, f"the message at byte {offset:,} is empty")
    _check(raw, metadata[0], offset + num_bytes, expansion)


def iter_record_batches(raw: BinaryIO, expansion: Expansion) -> Iterator[int]:
    """The offset of each record batch of a stream, whose messages up to there were checked."""
    offset = 0
    while metadata := _read_metadata(raw, offset, expansion):
        message, body = metadata
        hold(raw, offset, body + message.long(3))
        kind = _check(raw, message, body, expansion)
        if kind == RECORD_BATCH:
            yield offset
        offset = body + message.long(3)


def _read_metadata(raw: BinaryIO, offset: int, expansion: Expansion) -> "tuple[_Table, int] | None":
    """(message, offset of its body); None at the end."""
    body_start = raw.tell()
    try:
        raw.seek(offset)
        prefix = raw.read(4)
        # Messages of before Arrow 0.15 do not have it.
        if prefix == CONTINUATION:
            prefix = raw.read(4)
        # A stream ends with a length of 0, or simply with its file.
        if prefix in (b"", bytes(4)):
            return None
        length = int.from_bytes(prefix, "little", signed=True)
        return _read_table(raw, length), raw.tell()
    except (struct.error, ValueError) as error:
        raise _damaged(expansion, f"the message at byte {offset:,}: {error}") from error
    finally:
        raw.seek(body_start)


def _read_table(raw: BinaryIO, length: int) -> "_Table":
    if not 0 < length <= MAX_METADATA:
        raise ValueError(f"{length:,} bytes; {MAX_METADATA:,} are allowed")
    return _Table.root(raw.read(length))


def _check(raw: BinaryIO, message: "_Table", body: int, expansion: Expansion) -> int:
    """The type of a message. Raises StageError if its body claims too much."""
    offset = raw.tell()
    try:
        kind, num_rows, num_bytes = _claims(raw, message, body, expansion.file_bytes)
    except (struct.error, ValueError) as error:
        raise _damaged(expansion, f"the message before byte {body:,}: {error}") from error
    finally:
        raw.seek(offset)
    expansion.check(num_rows * ROW_BYTES, "rows in a batch")
    expansion.check(num_bytes, "buffers in a batch")
    if num_bytes > MAX_BATCH:
        raise StageError(
            f"{expansion.name}: a compressed record batch has {num_bytes:,} bytes; {MAX_BATCH:,} "
            "are allowed.\n  Write the file in smaller batches (write_table's max_chunksize)."
        )
    return kind


def _claims(
    raw: BinaryIO, message: "_Table", body: int, file_bytes: int | None
) -> tuple[int, int, int]:
    """(type of a message, its rows, bytes of its compressed buffers after decompression)."""
    # Message: 1 is the type of its header, 2 the header, 3 the length of its body.
    kind, length = message.byte(1), message.long(3)
    if length < 0 or body + length > (file_bytes or body + length):
        raise ValueError(f"a body of {length:,} bytes")
    batch = message.table(2) if kind in (DICTIONARY_BATCH, RECORD_BATCH) else None
    if batch and kind == DICTIONARY_BATCH:
        # A DictionaryBatch wraps a record batch with one column.
        batch = batch.table(1)
    if batch is None:
        return kind, 0, 0
    return kind, batch.long(0), _num_bytes(raw, batch, body, length)


def _num_bytes(raw: BinaryIO, batch: "_Table", body: int, length: int) -> int:
    """Bytes of the compressed buffers of a batch after decompression."""
    # RecordBatch: 0 is its rows, 2 its buffers, 3 its compression.
    buffers = batch.structs(2, PAIR)
    total = 0
    for start, size in buffers:
        if min(start, size) < 0 or start + size > length:
            raise ValueError(f"a buffer of {size:,} bytes at {start:,} of {length:,}")
        if size and batch.has(3):
            raw.seek(body + start)
            claimed = int.from_bytes(raw.read(8), "little", signed=True)
            # -1 says that this buffer alone is not compressed, as it would have grown.
            if claimed < -1:
                raise ValueError(f"a buffer of {claimed:,} bytes")
            total += max(0, claimed)
    return total


def _damaged(expansion: Expansion, why: str) -> StageError:
    return StageError(
        f"{expansion.name} cannot be read as arrow: {why}\n"
        "  It may be truncated or of another type: write it again, or set ds_type."
    )


class _Table:
    """A table in a flatbuffer. Raises struct.error outside of the buffer."""

    def __init__(self, content: bytes, position: int) -> None:
        self._content = content
        self._position = position
        # A table begins with the distance back to its vtable: its own size, the table's, and where
        # each field is, 16 bits each; 0 is a field that is not there.
        self._fields = position - self._unpack("<i", position)
        self._num_bytes: int = self._unpack("<H", self._fields)

    @classmethod
    def root(cls, content: bytes) -> "_Table":
        return cls(content, int.from_bytes(content[:4], "little"))

    def has(self, field: int) -> bool:
        return bool(self._offset(field))

    def byte(self, field: int) -> int:
        return self._scalar("<B", field)

    def long(self, field: int) -> int:
        return self._scalar("<q", field)

    def table(self, field: int) -> "_Table | None":
        position = self._pointer(field)
        return None if position is None else _Table(self._content, position)

    def structs(self, field: int, layout: struct.Struct) -> list[Any]:
        position = self._pointer(field)
        if position is None:
            return []
        count = self._unpack("<I", position)
        # A slice ends with the content: a false count would pass for a shorter vector.
        if count * layout.size > len(self._content):
            raise ValueError(f"a vector of {count:,} entries")
        start = position + 4
        return list(layout.iter_unpack(self._content[start : start + count * layout.size]))

    def _offset(self, field: int) -> int:
        entry = 4 + 2 * field
        return self._unpack("<H", self._fields + entry) if entry < self._num_bytes else 0

    def _scalar(self, layout: str, field: int) -> int:
        offset = self._offset(field)
        return self._unpack(layout, self._position + offset) if offset else 0

    def _pointer(self, field: int) -> int | None:
        offset = self._offset(field)
        if not offset:
            return None
        position = self._position + offset
        return position + self._unpack("<I", position)

    def _unpack(self, layout: str, position: int) -> Any:
        if position < 0:
            raise ValueError("an offset before the buffer")
        return struct.unpack_from(layout, self._content, position)[0]
