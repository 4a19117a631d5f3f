"""Multi-node workers: start and stop together, coordinated by files in the shared folder.

Ranks that lost a peer cannot continue, and torchrun must not join nodes that are about to stop. So
the first node assigns an id to each start, and the others join each start once; a node whose
workers die records that, and the others stop theirs.
"""

import time
import uuid
from pathlib import Path
from typing import Protocol

from penstock.core.files import atomic_write

LOOK_SECONDS = 0.5
"""Seconds between polls of the shared folder."""

START = "start"
ENDED = "ended-"


class MultiNode(Protocol):
    """One node's view of the others."""

    def may_start(self) -> bool:
        """Whether this node's workers may start now."""
        ...

    def started(self) -> None:
        """Record that they are about to start."""
        ...

    def died(self) -> None:
        """Record that they died."""
        ...

    def must_end(self) -> bool:
        """Whether workers of another node died, so that these must stop."""
        ...


class SingleNode:
    """A single node."""

    def may_start(self) -> bool:
        """Always true."""
        return True

    def started(self) -> None:
        """Nothing to record."""

    def died(self) -> None:
        """Nothing to record."""

    def must_end(self) -> bool:
        """Always false."""
        return False


class FirstNode:
    """The node of rank 0, which assigns an id to each start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start_id = ""
        self._last_poll = 0.0

    def may_start(self) -> bool:
        """True once its own workers have stopped."""
        return True

    def started(self) -> None:
        """Assign a new id."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob(f"{ENDED}*"):
            old.unlink(missing_ok=True)
        self._start_id = uuid.uuid4().hex
        with atomic_write(self._folder / START) as part:
            part.write_text(self._start_id, encoding="ascii")

    def died(self) -> None:
        """The next start implies it."""

    def must_end(self) -> bool:
        """Whether another node recorded that this start died there."""
        if time.monotonic() - self._last_poll < LOOK_SECONDS:
            return False
        self._last_poll = time.monotonic()
        return (self._folder / f"{ENDED}{self._start_id}").exists()


class OtherNode:
    """Any other node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._joined_id = ""
        self._last_poll = 0.0

    def may_start(self) -> bool:
        """Whether there is a start that this node has not joined."""
        return self._read_start_id() not in ("", self._joined_id)

    def started(self) -> None:
        """Join the current start."""
        self._joined_id = self._read_start_id()

    def died(self) -> None:
        """Record that it died here."""
        (self._folder / f"{ENDED}{self._joined_id}").touch()

    def must_end(self) -> bool:
        """Whether the first node has restarted."""
        if time.monotonic() - self._last_poll < LOOK_SECONDS:
            return False
        self._last_poll = time.monotonic()
        return self._read_start_id() not in ("", self._joined_id)

    def _read_start_id(self) -> str:
        try:
            return (self._folder / START).read_text(encoding="ascii")
        except OSError:
            return ""
