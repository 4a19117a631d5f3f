"""Ending work that takes too long, in the way a request to stop ends it."""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from penstock.core.errors import StageError


class _TimeIsUp(BaseException):
    """Travels as KeyboardInterrupt does, so that children are ended and locks are freed."""


class Deadline:
    """For a block of work in the main thread; without a limit it never ends anything.

    It is a signal, which reaches what sleeps or waits for children; a thread could only watch.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    @contextmanager
    def kept(self, what: str) -> Generator[None]:
        """Around all of the work. Raises StageError with the text `what` once time is up."""
        if self._seconds is None:
            yield
            return
        handler = signal.signal(signal.SIGALRM, _raise)
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        try:
            yield
        except _TimeIsUp:
            raise StageError(what) from None
        finally:
            # What somebody else had set goes on, a little late.
            signal.setitimer(signal.ITIMER_REAL, left)
            signal.signal(signal.SIGALRM, handler)

    def begin(self) -> None:
        """From now on time counts."""
        if self._seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, self._seconds)


def _raise(_signum: int, _frame: FrameType | None) -> None:
    raise _TimeIsUp
