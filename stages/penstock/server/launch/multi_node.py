"""Workers of several machines start and end together, by files in the folder that all share.

Ranks that lost one another cannot go on, and torchrun of one machine must not join others that are
about to end. So the first machine names each start, and the others take part in a named start once;
whoever sees its workers die says so, and the rest end theirs.
"""

import time
import uuid
from pathlib import Path
from typing import Protocol

from penstock.core.files import atomic_write

LOOK_SECONDS = 0.5
"""Between two looks at the shared folder."""

START = "start"
ENDED = "ended-"


class MultiNode(Protocol):
    """What one machine knows of the others."""

    def may_start(self) -> bool:
        """Whether the workers of this machine may start now."""
        ...

    def started(self) -> None:
        """Note that they are about to."""
        ...

    def died(self) -> None:
        """Say that they ended."""
        ...

    def must_end(self) -> bool:
        """Whether the workers of another machine ended, so that these cannot go on."""
        ...


class SingleNode:
    """There is one machine."""

    def may_start(self) -> bool:
        """Always."""
        return True

    def started(self) -> None:
        """Nobody else needs to know."""

    def died(self) -> None:
        """Nobody else needs to know."""

    def must_end(self) -> bool:
        """Never."""
        return False


class First:
    """The machine of rank 0, which names each start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = ""
        self._looked = 0.0

    def may_start(self) -> bool:
        """Whenever its own workers have ended."""
        return True

    def started(self) -> None:
        """Name a new start."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob(f"{ENDED}*"):
            old.unlink(missing_ok=True)
        self._name = uuid.uuid4().hex
        with atomic_write(self._folder / START) as part:
            part.write_text(self._name, encoding="ascii")

    def died(self) -> None:
        """The next start says it."""

    def must_end(self) -> bool:
        """Whether another machine says that this start has ended there."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        return (self._folder / f"{ENDED}{self._name}").exists()


class Other:
    """Any other machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._joined = ""
        self._looked = 0.0

    def may_start(self) -> bool:
        """Once there is a start that this machine has not taken part in."""
        return self._named() not in ("", self._joined)

    def started(self) -> None:
        """Take part in the start that is named now."""
        self._joined = self._named()

    def died(self) -> None:
        """Say that it has ended here."""
        (self._folder / f"{ENDED}{self._joined}").touch()

    def must_end(self) -> bool:
        """Whether the first machine has started anew."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        return self._named() not in ("", self._joined)

    def _named(self) -> str:
        try:
            return (self._folder / START).read_text(encoding="ascii")
        except OSError:
            return ""
