"""Keeping elsewhere what a stage finishes on its way, while it goes on working."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from penstock.core.cache.stage import ATTEMPT, Stage
from penstock.core.errors import PenstockError
from penstock.core.remote.artifact_sync import RemoteArtifact

INTERVAL = 2.0
"""Seconds between looks for something new."""


class BackgroundUploader:
    """Sends a stage's keepsakes as they appear, and what is left of them at the end.

    A connection that is lost meanwhile stops nothing: it is said once, and tried again.
    """

    def __init__(self, depot: RemoteArtifact, stage: Stage, notify: Callable[[str], None]) -> None:
        self._depot, self._stage, self._notify = depot, stage, notify
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="penstock-follower", daemon=True)
        self._complained = False
        self._kept: dict[str, None] = {}
        """What was sent of the groups, in order."""

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
        """Send what is new, each group before the next one, and drop there what is dropped here.

        What goes on changing is sent along with something else, and at the end.
        """
        *groups, changing = self._stage.keepsakes(self._depot.folder) or [[]]
        if not groups and not changing:
            return
        folder = self._depot.folder
        news = sum(self._sent(group) for group in ([folder / ATTEMPT], *groups))
        self._kept |= {path.relative_to(folder).as_posix(): None for g in groups for path in g}
        self._drop()
        if news or when == "at the end":
            self._sent(changing)

    def _sent(self, group: Sequence[Path]) -> int:
        folder = self._depot.folder
        names = [path.relative_to(folder).as_posix() for path in group if path.is_file()]
        try:
            return self._depot.send(names)
        except FileNotFoundError:
            # Gone while it was being sent: the stage keeps it no longer.
            return 0

    def _drop(self) -> None:
        """Forget what this run has sent and then deleted; what a group ends with goes first."""
        gone = [name for name in self._kept if not (self._depot.folder / name).exists()]
        for name in reversed(gone):
            self._depot.drop(name)
            del self._kept[name]

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
