"""Being asked to stop: finish the step, save, leave."""

import signal
import time
from pathlib import Path
from types import FrameType

STOP_FILE = "STOP"
"""A file of this name in the run's folder asks as a signal does, from any machine that sees it."""

LOOK_SECONDS = 0.5
"""Between two looks for the file: a folder may be shared by many, and steps may be short."""


class StopRequest:
    """Set by SIGTERM, SIGINT or the alarm of a deadline, and by a file in `folder`.

    The handler only takes a note: printing into a closed pipe from here would raise in the middle
    of a step, and the emergency save would be lost.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.signum: int | None = None
        self._file = folder / STOP_FILE if folder else None
        self._is_written, self._looked = False, float("-inf")

    def listen(self) -> "StopRequest":
        """Install the handlers; must be called in the main thread."""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(signum, self._note)
        return self

    def __bool__(self) -> bool:
        return self.signum is not None or self._look()

    def _look(self) -> bool:
        """Whether the file is there, or was."""
        now = time.monotonic()
        if self._file and not self._is_written and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._is_written = self._file.exists()
        return self._is_written

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.signum = signum
