"""Timeouts: interrupt work in the same way as a stop request."""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from penstock.core.errors import StageError


class _TimeoutReached(BaseException):
    """Propagates like KeyboardInterrupt, so that children are ended and locks are released."""


class Deadline:
    """A time limit for a block in the main thread; None is unlimited. Uses a signal, which
    interrupts sleeps and waits for children; a thread could not."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    @contextmanager
    def enforce(self, subject: str) -> Generator[None]:
        """Raises StageError with the text `subject` on timeout."""
        if self._seconds is None:
            yield
            return
        handler = signal.signal(signal.SIGALRM, _raise)
        remaining, _ = signal.getitimer(signal.ITIMER_REAL)
        try:
            yield
        except _TimeoutReached:
            raise StageError(subject) from None
        finally:
            # Restore the previous timer, slightly delayed.
            signal.setitimer(signal.ITIMER_REAL, remaining)
            signal.signal(signal.SIGALRM, handler)

    def start(self) -> None:
        if self._seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, self._seconds)


def _raise(_signum: int, _frame: FrameType | None) -> None:
    raise _TimeoutReached
