"""Log rate limit: clients cannot flood the log with lines that differ only in their values."""

import logging
import time
from collections.abc import Callable

LINES = 20
SECONDS = 10.0
MAX_KINDS = 1000  # Maximum number of distinct line formats


class LogLimit(logging.Filter):
    """Passes LINES of each format per SECONDS, then logs how many were suppressed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        kind = (record.name, record.levelno, str(record.msg)[:200])
        began, count = self._kinds.get(kind, (now, 0))
        left_out = 0
        if now - began >= SECONDS:
            began, left_out, count = now, max(0, count - LINES), 0
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            self._kinds.pop(next(iter(self._kinds)))
        self._kinds[kind] = (began, count + 1)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more were left out)", ()
        return count < LINES
