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
from penstock.core.sources.local_files import detect_compression

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

    def too_large(self, place: str) -> StageError:
        """The error for a record of more than `max_record_bytes`; `place` is what is too large."""
        return StageError(
            f"{self.name}: {place} has more than {self.max_record_bytes:,} bytes "
            "(data.max_record_bytes).\n  Split it, or raise data.max_record_bytes."
        )

    @contextmanager
    def open(self) -> Generator[BinaryIO]:
        """Open as a decompressed, buffered stream. Raises StageError if decompression fails."""
        with open_file(self.location, self.pinned) as raw:
            if self.compression is None:
                yield _buffer(raw)
                return
            try:
                with _open_decompressed(raw, self.compression) as stream:
                    yield _buffer(stream)
            except DECOMPRESSION_ERRORS as error:
                raise StageError(
                    f"{self.name} cannot be decompressed as {self.compression}: {error}\n"
                    "  It may be truncated or of another type: write it again, or rename it."
                ) from error

    def open_arrow(self) -> Any:
        """Open for pyarrow; not memory-mapped, because mapped pages count as used memory."""
        if isinstance(self.location, Path):
            return pa.OSFile(str(self.location))
        return pa.PythonFile(open_file(self.location, self.pinned), mode="r")


def _open_decompressed(raw: BinaryIO, compression: str) -> Any:
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if compression == "bz2":
        return _StreamsRawIO(raw, bz2.BZ2Decompressor)
    if compression == "xz":
        return _StreamsRawIO(raw, lzma.LZMADecompressor)
    return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)


def _buffer(stream: Any) -> BinaryIO:
    if isinstance(stream, io.BufferedReader):
        return stream
    if isinstance(stream, pa.NativeFile):
        stream = _ArrowRawIO(stream)
    return cast("BinaryIO", io.BufferedReader(stream, buffer_size=1 << 18))


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


class _ArrowRawIO(io.RawIOBase):
    """An Arrow stream as a Python raw stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        got = self._stream.read(len(buffer))
        buffer[: len(got)] = got
        return len(got)
