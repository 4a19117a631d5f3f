"""Output of child processes, which is bytes, on a text stream that may have no bytes beneath it. A
terminal's stream has a `buffer`. That of a notebook, or of a GUI's console, has none."""

import codecs
from typing import Protocol, TextIO


class ByteStream(Protocol):
    """What takes the output of a child process."""

    def write(self, data: bytes, /) -> object:
        """Write all of the bytes."""
        ...

    def flush(self) -> object:
        """Show what was written."""
        ...


def byte_stream(stream: TextIO) -> ByteStream:
    """The stream's own buffer, or one that decodes UTF-8, in which characters may be cut in two."""
    return getattr(stream, "buffer", None) or _DecodingStream(stream)


class _DecodingStream:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes, /) -> None:
        self._stream.write(self._decoder.decode(data))

    def flush(self) -> None:
        self._stream.flush()
