"""Multi-node workers: start and stop together, coordinated by files in the shared folder.

Ranks that lost a peer cannot continue, and torchrun must not join nodes that are about to stop. So
the first node assigns an id to each start, and the others join each start once; a node whose
workers die records that, and the others stop theirs.
"""

import time
import uuid
from pathlib import Path

from penstock.core.files import atomic_write

LOOK_SECONDS = 0.5  # Seconds between polls of the shared folder
START = "start"
ENDED = "ended-"


class MultiNode:
    """One node's view of the others; this one has none."""

    def may_start(self) -> bool:
        """Whether this node's workers may start, once those before have stopped."""
        return True

    def started(self) -> None:
        """Record that they are about to start."""

    def died(self) -> None:
        """Record that they died."""

    def must_end(self) -> bool:
        """Whether workers of another node died, so that these must stop."""
        return False


class FirstNode(MultiNode):
    """The node of rank 0, which assigns an id to each start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start_id = ""
        self._last_poll = 0.0

    def started(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob(f"{ENDED}*"):
            old.unlink(missing_ok=True)
        self._start_id = uuid.uuid4().hex
        with atomic_write(self._folder / START) as part:
            part.write_text(self._start_id, encoding="ascii")

    def must_end(self) -> bool:
        if time.monotonic() - self._last_poll < LOOK_SECONDS:
            return False
        self._last_poll = time.monotonic()
        return self._has_died_elsewhere()

    def _has_died_elsewhere(self) -> bool:
        return (self._folder / f"{ENDED}{self._start_id}").exists()


class OtherNode(FirstNode):
    """Any other node, which joins the starts of the first."""

    def may_start(self) -> bool:
        """Whether there is a start that this node has not joined."""
        return self._read_start_id() not in ("", self._start_id)

    def started(self) -> None:
        self._start_id = self._read_start_id()

    def died(self) -> None:
        (self._folder / f"{ENDED}{self._start_id}").touch()

    def _has_died_elsewhere(self) -> bool:
        # The first node has then started again.
        return self.may_start()

    def _read_start_id(self) -> str:
        try:
            return (self._folder / START).read_text(encoding="ascii")
        except OSError:
            return ""
