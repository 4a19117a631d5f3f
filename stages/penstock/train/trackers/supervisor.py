"""Supervisor of tracker processes: starts, monitors and stops them from rank 0.

They cannot delay training: they read a file, and are polled occasionally.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.train.trackers.tracker import Ending

SHUTDOWN_SECONDS = 20.0
"""Seconds for all of them together to finish uploading after the run."""

KILL_SECONDS = 5.0


class TrackerProcess:
    """One tracker process."""

    def __init__(self, title: str, module: Sequence[str], log: Path) -> None:
        """Start `python -m module…`, which exits when its standard input closes; its output goes to
        `log`."""
        self.title, self.log = title, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                # -P keeps the working directory off sys.path.
                [sys.executable, "-P", "-m", *module],
                # No child that starts later inherits it (PEP 446): it closes if this process dies.
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
            )
        self._is_reported = False

    def poll_failure(self) -> str | None:
        """Why it exited early; returned once."""
        status = self._process.poll()
        if not status or self._is_reported:
            return None
        self._is_reported = True
        return self._failure_reason(status)

    def signal_end(self, ending: Ending) -> None:
        stdin = self._process.stdin
        if stdin:
            # A process that has ended has closed its end of the pipe.
            with suppress(OSError):
                stdin.write(ending.encode())
            # The write was buffered: a pipe without a reader shows in the flush of close.
            with suppress(OSError):
                stdin.close()

    def wait(self, until: float) -> str | None:
        """Wait for its exit until that time on the monotonic clock, then kill it.

        Returns a message about that, if any.
        """
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_SECONDS)
            return "it did not upload the last records in time"
        return self.poll_failure()

    def _failure_reason(self, status: int) -> str:
        with suppress(OSError, ValueError):
            lines = self.log.read_text(errors="replace").strip().splitlines()
            if any(line.startswith("Timeout (") for line in lines):
                return "a call to it timed out"
            # Empty if the process was killed, as by the kernel for memory.
            if lines:
                return lines[-1].strip()
        return f"its process ended with status {status}"


class TrackerSupervisor:
    """All tracker processes of a run. `notify` is called once for each that fails."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._all: list[TrackerProcess] = []

    def start(self, title: str, module: Sequence[str], log: Path) -> None:
        """Start a process. A process that fails to start is reported and does not stop the run."""
        try:
            self._all.append(TrackerProcess(title, module, log))
        except OSError as error:
            self._notify(f"{title} did not start: {error}")

    def poll(self) -> None:
        """Report processes that failed since the last check."""
        for process in self._all:
            if fault := process.poll_failure():
                self._notify_failure(process, fault)

    def close(self, ending: Ending) -> None:
        """Let all of them finish within SHUTDOWN_SECONDS."""
        until = time.monotonic() + SHUTDOWN_SECONDS
        # All are told before any is waited for: they upload the rest at the same time.
        for process in self._all:
            process.signal_end(ending)
        for process in self._all:
            if fault := process.wait(until):
                self._notify_failure(process, fault)

    def _notify_failure(self, process: TrackerProcess, fault: str) -> None:
        self._notify(
            f"{process.title} stopped: {fault} (see {process.log}). Training continues, "
            "metrics.jsonl has all records, and the next start resumes after the last uploaded one"
        )
