"""Background uploader of intermediate files while a stage runs."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from penstock.core.cache.stage import ATTEMPT, Stage
from penstock.core.errors import PenstockError
from penstock.core.remote.artifact_sync import RemoteArtifact

INTERVAL = 2.0
"""Seconds between scans for new files."""


class BackgroundUploader:
    """Uploads a stage's intermediate files as they appear, and the remaining ones at the end.

    A lost connection does not stop the stage: it is logged once, and the upload is retried.
    """

    def __init__(self, depot: RemoteArtifact, stage: Stage, notify: Callable[[str], None]) -> None:
        self._depot, self._stage, self._notify = depot, stage, notify
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="penstock-follower", daemon=True)
        self._complained = False
        self._kept: dict[str, None] = {}
        """The uploaded files, in order."""

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Upload the rest. An upload failure is raised only if nothing else has failed."""
        self._ended.set()
        self._thread.join()
        try:
            self.send("at the end")
        except PenstockError as failure:
            if error is None:
                raise
            self._complain(failure)

    def send(self, when: Literal["meanwhile", "at the end"]) -> None:
        """Upload new files, group by group, and delete remote files that were deleted locally.

        Files that keep changing are uploaded together with others, and at the end.
        """
        *groups, changing = self._stage.files_to_upload(self._depot.folder) or [[]]
        if not groups and not changing:
            return
        folder = self._depot.folder
        # The record first: another machine resumes no files whose build is unknown.
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
            # The stage deleted the file during its upload.
            return 0

    def _drop(self) -> None:
        # The last file of a group goes first: it marks the group as complete.
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
