"""The leading rank's side: processes that follow its records, started, watched and let go.

None of them can hold training up: they read a file, and are looked at now and then.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.train.trackers.tracker import Ending

PARTING_SECONDS = 20.0
"""How long they may take together, once the run has ended, for what they have not told yet."""

KILLED_SECONDS = 5.0


class TrackerProcess:
    """One such process."""

    def __init__(self, title: str, module: Sequence[str], log: Path) -> None:
        """Start `python -m module…`, which ends when its input does; it speaks in `log`."""
        self.title, self.log = title, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                # -P: the folder we are in holds names that are not ours to import.
                [sys.executable, "-P", "-m", *module],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
            )
        self._is_told = False

    def fault(self) -> str | None:
        """Why it ended before it was asked to; said once."""
        status = self._process.poll()
        if not status or self._is_told:
            return None
        self._is_told = True
        return self._last_words(status)

    def let_go(self, ending: Ending) -> None:
        """No more records will come: the run has `finished` or was `stopped`."""
        stdin = self._process.stdin
        if stdin:
            with suppress(OSError):
                stdin.write(ending.encode())
            with suppress(OSError):
                stdin.close()

    def wait(self, until: float) -> str | None:
        """Wait for it until then on the monotonic clock, and end it if that was too short.

        Returns what is to be said of that.
        """
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_SECONDS)
            return "it did not take the last records in time"
        return self.fault()

    def _last_words(self, status: int) -> str:
        with suppress(OSError, ValueError):
            lines = self.log.read_text(errors="replace").strip().splitlines()
            if any(line.startswith("Timeout (") for line in lines):
                return "it did not answer"
            return lines[-1].strip()
        return f"its process ended with status {status}"


class TrackerSupervisor:
    """All of a run's. `notify` is told of each that fails, once."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._all: list[TrackerProcess] = []

    def start(self, title: str, module: Sequence[str], log: Path) -> None:
        """Start one more. A process that cannot be started is told, and no fault of the run."""
        try:
            self._all.append(TrackerProcess(title, module, log))
        except OSError as error:
            self._notify(f"{title} does not follow this run: {error}")

    def look(self) -> None:
        """Say which have failed since the last look."""
        for courier in self._all:
            if fault := courier.fault():
                self._tell(courier, fault)

    def close(self, ending: Ending) -> None:
        """Let all of them finish, for so long at most."""
        until = time.monotonic() + PARTING_SECONDS
        for courier in self._all:
            courier.let_go(ending)
        for courier in self._all:
            if fault := courier.wait(until):
                self._tell(courier, fault)

    def _tell(self, courier: TrackerProcess, fault: str) -> None:
        self._notify(
            f"{courier.title} follows this run no more: {fault} (see {courier.log}). Training goes "
            "on, metrics.jsonl has everything, and the next start goes on from where it was"
        )
