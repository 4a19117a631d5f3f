"""Being asked to stop: finish the step, save, leave."""

import signal
from types import FrameType


class StopRequest:
    """Set by SIGTERM or SIGINT.

    The handler only takes a note: printing into a closed pipe from here would raise in the middle
    of a step, and the emergency save would be lost.
    """

    def __init__(self) -> None:
        self.signum: int | None = None

    def listen(self) -> "StopRequest":
        """Install the handlers; must be called in the main thread."""
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)
        return self

    def __bool__(self) -> bool:
        return self.signum is not None

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.signum = signum
