"""Rank heartbeat files: the current phase of a rank, readable while the rank hangs or after it
died."""

import json
import os
import platform
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.core.machine.linux import process_start

# Size in bytes of a heartbeat file. Each heartbeat overwrites the whole file in one write.
SIZE = 512

SUFFIX = ".pulse"

MAX_STORED_PHASES = 64  # Number of stored phases: more than come before the first training step


@dataclass
class RankStatus:
    """A rank and its current phase."""

    rank: int
    pid: int
    host: str
    step: int = 0  # Number of completed steps
    marks: int = 0
    """Number of phases begun since the last completed step. The rank with fewer phases is behind.
    """
    phase: str = "starting"
    waiting: bool = False  # Whether the rank is in a collective operation
    since: float = 0.0  # Start of the phase in seconds since the epoch

    @property
    def progress(self) -> tuple[int, int]:
        """Progress as (steps, phases); larger is further."""
        return self.step, self.marks


class Heartbeat:
    """Writes the heartbeat of this process. Without a folder it writes nothing. A write takes
    microseconds and never raises: a failed heartbeat must not stop training."""

    def __init__(self, folder: Path | None = None, *, rank: int = 0) -> None:
        self._status = RankStatus(rank, os.getpid(), platform.node())
        self._file: int | None = None
        self._listener: Callable[[RankStatus], None] | None = None
        self.first_phases: list[tuple[str, float]] = [("starting", process_start() or time.time())]
        """The first phases of the process and their start times in seconds since the epoch."""
        if folder is not None:
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"rank_{rank}{SUFFIX}"
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write()

    def set_listener(self, listener: Callable[[RankStatus], None] | None) -> None:
        """Also pass each heartbeat to `listener` in this process."""
        self._listener = listener

    def set_phase(self, phase: str, *, step: int | None = None) -> None:
        """Enter `phase`, such as `forward`; `step` is the number of completed steps."""
        status = self._status
        if step is not None and step != status.step:
            status.step, status.marks = step, 0
        status.marks += 1
        status.phase = phase
        self._write()
        if phase != self.first_phases[-1][0] and len(self.first_phases) < MAX_STORED_PHASES:
            self.first_phases.append((phase, status.since))

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Mark a collective operation, which ends once other ranks reach it."""
        before, self._status.waiting = self._status.waiting, True
        self._write()
        try:
            yield
        finally:
            self._status.waiting = before
            self._write()

    def _write(self) -> None:
        self._status.since = time.time()
        if self._listener:
            self._listener(self._status)
        if self._file is not None:
            with suppress(OSError):
                line = json.dumps(vars(self._status)).encode()
                os.pwrite(self._file, line.ljust(SIZE)[:SIZE], 0)


def read_heartbeats(folder: Path) -> list[RankStatus]:
    """The last heartbeat of each rank in `folder`, by rank."""
    statuses: list[RankStatus] = []
    for path in folder.glob(f"rank_*{SUFFIX}"):
        with suppress(OSError, ValueError, TypeError):
            statuses.append(RankStatus(**json.loads(path.read_bytes())))
    return sorted(statuses, key=lambda status: status.rank)
