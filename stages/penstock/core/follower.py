"""Keeping elsewhere what a stage finishes on its way, while it goes on working."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from penstock.core.depot import Depot
from penstock.core.errors import PenstockError
from penstock.core.stage import ATTEMPT, Stage

INTERVAL = 2.0
"""Seconds between looks for something new."""


class Follower:
    """Sends a stage's keepsakes as they appear, and what is left of them at the end.

    A connection that is lost meanwhile stops nothing: it is said once, and tried again.
    """

    def __init__(self, depot: Depot, stage: Stage, notify: Callable[[str], None]) -> None:
        self._depot, self._stage, self._notify = depot, stage, notify
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="penstock-follower", daemon=True)
        self._complained = False

    def __enter__(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Send the rest. A failure to do so counts only if nothing else has failed."""
        self._ended.set()
        self._thread.join()
        try:
            self.send("at the end")
        except PenstockError as failure:
            if error is None:
                raise
            self._complain(failure)

    def send(self, when: Literal["meanwhile", "at the end"]) -> None:
        """Send what is new, each group before the next one.

        What goes on changing is sent along with something else, and at the end.
        """
        *groups, changing = self._stage.keepsakes(self._depot.folder) or [[]]
        if not groups and not changing:
            return
        news = sum(self._sent(group) for group in ([self._depot.folder / ATTEMPT], *groups))
        if news or when == "at the end":
            self._sent(changing)

    def _sent(self, group: Sequence[Path]) -> int:
        folder = self._depot.folder
        names = [path.relative_to(folder).as_posix() for path in group if path.is_file()]
        return self._depot.send(names)

    def _follow(self) -> None:
        while not self._ended.wait(INTERVAL):
            try:
                self.send("meanwhile")
            except PenstockError as failure:
                self._complain(failure)

    def _complain(self, failure: PenstockError) -> None:
        if not self._complained:
            self._complained = True
            self._notify(f"{failure}\n  The work goes on here; sending is tried again.")
