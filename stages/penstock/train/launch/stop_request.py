"""Graceful stop on a signal or a STOP file: finish the step, save, exit."""

import signal
import time
from pathlib import Path
from types import FrameType

from penstock.core.process.hangup import hangup_signals

STOP_FILE = "STOP"
"""A file of this name in the run folder requests a stop, from any machine that shares the
folder."""

# Seconds between checks for the file: the folder may be on a network, and steps may be short.
POLL_SECONDS = 0.5


class StopRequest:
    """A stop request: set by SIGTERM, SIGINT, SIGHUP or a timeout alarm, and by a file in `folder`.

    The handler only sets a flag: printing into a closed pipe would raise in the middle of a step,
    and the emergency checkpoint would be lost.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.signum: int | None = None
        self._file = folder / STOP_FILE if folder else None
        self._file_seen, self._last_check = False, float("-inf")

    def install_handlers(self) -> "StopRequest":
        """Install the handlers; must be called in the main thread."""
        for signum in (signal.SIGTERM, signal.SIGINT, *hangup_signals(), signal.SIGALRM):
            signal.signal(signum, self._handle_signal)
        return self

    def __bool__(self) -> bool:
        return self.signum is not None or self._file_exists()

    def _file_exists(self) -> bool:
        """Whether the file exists, or existed at an earlier check."""
        now = time.monotonic()
        if self._file and not self._file_seen and now - self._last_check >= POLL_SECONDS:
            self._last_check = now
            self._file_seen = self._file.exists()
        return self._file_seen

    def _handle_signal(self, signum: int, _frame: FrameType | None) -> None:
        self.signum = signum
