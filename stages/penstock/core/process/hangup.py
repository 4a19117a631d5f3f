"""A terminal that is closed, or a pipe whose reader ends, while a run goes on.

Python raises BrokenPipeError or EIO from `print`, `warnings` and tqdm then, and ENOSPC when the
disk of a log is full. In the middle of a step that would end a rank before its emergency
checkpoint, so such output is lost instead.
"""

import errno
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

# Errors of a pipe without a reader, and of a terminal that was closed.
READER_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)


def hangup_signals() -> tuple[signal.Signals, ...]:
    """SIGHUP, which the kernel sends when the terminal is closed; none under nohup, which ignores
    it."""
    return () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)


class _LossyStream:
    """A text stream whose writes never raise OSError; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        # All further output goes nowhere, that of C libraries and child processes too. A full disk
        # may have room again.
        if error.errno in READER_GONE:
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


@contextmanager
def lossy_output(*names: str) -> Generator[None]:
    """Make these streams of `sys` ("stdout", "stderr") lossy during the block."""
    streams = {name: getattr(sys, name) for name in names}
    for name, stream in streams.items():
        setattr(sys, name, cast(TextIO, _LossyStream(stream)))
    try:
        yield
    finally:
        for name, stream in streams.items():
            setattr(sys, name, stream)
