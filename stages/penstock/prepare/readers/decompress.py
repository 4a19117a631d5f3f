"""Open files of a source as streams, decompressed according to their names."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from penstock.config.schema.dataset import MAX_RECORD_BYTES
from penstock.core.errors import StageError
from penstock.core.remote.open import open_file
from penstock.core.remote.seekable import SeekableRawIO
from penstock.core.sources.local_files import detect_compression
from penstock.prepare.readers.expansion import Expansion

BLOCK = 1 << 18

DECOMPRESSION_ERRORS = (EOFError, zlib.error, lzma.LZMAError, pa.ArrowException, OSError)
"""Errors that the decompression libraries raise for damaged files."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a source: its display name, location and pin."""

    name: str
    location: Path | str = field(compare=False)
    pinned: Mapping[str, Any] = field(default_factory=dict)
    data_file: "SourceFile | None" = None
    """The data file (.bin), if this file is a Megatron index (.idx)."""
    max_record_bytes: int = field(default=MAX_RECORD_BYTES, compare=False)
    """`data.max_record_bytes`."""

    @property
    def compression(self) -> str | None:
        """Compression, from the file name; None if uncompressed."""
        return detect_compression(self.name)

    def too_large(self, location: str) -> StageError:
        """The error for a record of more than `max_record_bytes`; `location` is what is
        too large."""
        return StageError(
            f"{self.name}: {location} has more than {self.max_record_bytes:,} bytes "
            "(data.max_record_bytes).\n  Split it, or raise data.max_record_bytes."
        )

    @contextmanager
    def open(self) -> Generator[BinaryIO]:
        """Open as a decompressed, buffered stream. Raises StageError if decompression fails."""
        with open_file(self.location, self.pinned) as raw:
            if self.compression is None:
                yield _buffer(raw)
                return
            expansion = Expansion(self.name, raw.seek(0, io.SEEK_END))
            raw.seek(0)
            try:
                with _open_decompressed(raw, self.compression) as stream:
                    yield _buffer(_CountedRawIO(stream, expansion))
            except DECOMPRESSION_ERRORS as error:
                raise StageError(
                    f"{self.name} cannot be decompressed as {self.compression}: {error}\n"
                    "  It may be truncated or of another type: write it again, or rename it."
                ) from error

    @contextmanager
    def open_arrow(self) -> Generator[tuple[pa.NativeFile, BinaryIO]]:
        """(the file for pyarrow, the same for Python, whose offset is its own if it is local)."""
        with open_file(self.location, self.pinned) as raw:
            if isinstance(self.location, Path):
                # Not memory-mapped: mapped pages count as used memory.
                with pa.OSFile(str(self.location)) as stream:
                    yield stream, raw
            else:
                window = cast("BinaryIO", _Window(raw))
                with pa.PythonFile(window, mode="r") as stream:
                    yield stream, window


def hold(raw: BinaryIO, start: int, stop: int) -> None:
    """Fetch [start, stop) of a remote file in one request; it is in memory until the next call."""
    if isinstance(raw, _Window):
        raw.hold(start, stop)


def _open_decompressed(raw: BinaryIO, compression: str) -> Any:
    if compression == "gzip":
        # It reads concatenated streams itself, and raises BadGzipFile for anything else after the
        # first.
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if compression == "bz2":
        return _StreamsRawIO(raw, bz2.BZ2Decompressor)
    if compression == "xz":
        return _StreamsRawIO(raw, lzma.LZMADecompressor)
    # zstd: the standard library has it from Python 3.14 on.
    return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)


def _buffer(stream: Any) -> BinaryIO:
    if isinstance(stream, io.BufferedReader):
        return stream
    return cast("BinaryIO", io.BufferedReader(stream, buffer_size=BLOCK))


class _StreamsRawIO(io.RawIOBase):
    """Concatenated compressed streams. `BZ2File` and `LZMAFile` ignore a damaged one after the
    first, with all that follows."""

    def __init__(self, raw: BinaryIO, decompressor: Callable[[], Any]) -> None:
        self._raw = raw
        self._new = decompressor
        self._current = decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises EOFError if a stream is truncated, and as the decompressors."""
        while True:
            content = b""
            if self._current.eof:
                content = self._current.unused_data.lstrip(b"\0")  # padding of xz
                while not content and (block := self._raw.read(BLOCK)):
                    content = block.lstrip(b"\0")
                if not content:
                    return 0
                self._current = self._new()
            elif self._current.needs_input and not (content := self._raw.read(BLOCK)):
                raise EOFError("it ends before the end of a compressed stream")
            if part := self._current.decompress(content, len(buffer)):
                buffer[: len(part)] = part
                return len(part)


class _CountedRawIO(io.RawIOBase):
    def __init__(self, stream: Any, expansion: Expansion) -> None:
        self._stream = stream
        self._expansion = expansion

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        self._expansion.add(len(content))
        return len(content)


class _Window(SeekableRawIO):
    """A remote file of which a range is in memory."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream
        self._start = 0
        self._held = b""

    @property
    def size(self) -> int:
        return self._stream.seek(0, io.SEEK_END)

    def hold(self, start: int, stop: int) -> None:
        self._held = b""
        self._stream.seek(start)
        self._start, self._held = start, self._stream.read(stop - start)

    def readinto(self, buffer: Any) -> int:
        start = self._offset - self._start
        if 0 <= start < len(self._held):
            content = self._held[start : start + len(buffer)]
        else:
            self._stream.seek(self._offset)
            content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        self._offset += len(content)
        return len(content)
