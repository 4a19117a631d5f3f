"""What a rank is doing just now, in a small file that others may read while it hangs or is dead."""

import json
import os
import platform
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SIZE = 512
"""Bytes of a pulse's file: a beat overwrites all of the one before it, in one write."""

SUFFIX = ".pulse"

MOST_BEGINNINGS = 64
"""Phases that are remembered: more than come before the first step of any work."""


@dataclass
class RankStatus:
    """One rank, and what it began last."""

    rank: int
    pid: int
    host: str
    step: int = 0
    """Steps that are done."""
    marks: int = 0
    """Phases begun since the last step was done: of two ranks the one with fewer is behind."""
    phase: str = "starting"
    waiting: bool = False
    """Whether it is in an operation that ends when other ranks have come as far."""
    since: float = 0.0
    """Seconds since the epoch."""

    @property
    def progress(self) -> tuple[int, int]:
        """How far it is; larger is further."""
        return self.step, self.marks


class Heartbeat:
    """Tells what its process does. Without a folder it tells nobody.

    Writing costs some microseconds and never fails: work does not stop for want of its record.
    """

    def __init__(self, folder: Path | None = None, *, rank: int = 0) -> None:
        """Begin to tell in `folder`/rank_N.pulse."""
        self._beat = RankStatus(rank, os.getpid(), platform.node())
        self._file: int | None = None
        self._hears: Callable[[RankStatus], None] | None = None
        self.beginnings: list[tuple[str, float]] = [("starting", process_start())]
        """The first phases of the process, and when each began, in seconds since the epoch."""
        if folder is not None:
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"rank_{rank}{SUFFIX}"
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write()

    def listen(self, hears: Callable[[RankStatus], None] | None) -> None:
        """Hand every beat to `hears` too, in this process; None: to nobody any more."""
        self._hears = hears

    def begins(self, phase: str, *, step: int | None = None) -> None:
        """From now on it is in `phase`, such as `forward`; `step` says how many steps are done."""
        beat = self._beat
        if step is not None and step != beat.step:
            beat.step, beat.marks = step, 0
        beat.marks += 1
        beat.phase = phase
        self._write()
        if phase != self.beginnings[-1][0] and len(self.beginnings) < MOST_BEGINNINGS:
            self.beginnings.append((phase, beat.since))

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Around an operation that ends when other ranks have come as far."""
        before, self._beat.waiting = self._beat.waiting, True
        self._write()
        try:
            yield
        finally:
            self._beat.waiting = before
            self._write()

    def _write(self) -> None:
        self._beat.since = time.time()
        if self._hears:
            self._hears(self._beat)
        if self._file is not None:
            with suppress(OSError):
                line = json.dumps(vars(self._beat)).encode()
                os.pwrite(self._file, line.ljust(SIZE)[:SIZE], 0)


def beats(folder: Path) -> list[RankStatus]:
    """The last beat of each rank that tells in `folder`, by rank."""
    found: list[RankStatus] = []
    for path in folder.glob(f"rank_*{SUFFIX}"):
        with suppress(OSError, ValueError, TypeError):
            found.append(RankStatus(**json.loads(path.read_bytes())))
    return sorted(found, key=lambda beat: beat.rank)


def process_start() -> float:
    """When this process began, in seconds since the epoch; where nobody knows, now."""
    now = time.time()
    with suppress(OSError, ValueError, IndexError):
        # The name, in parentheses, may hold anything; the 20th field behind it counts from boot.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return now - up + ticks / os.sysconf("SC_CLK_TCK")
    return now
