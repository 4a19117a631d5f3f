"""Managed child process: start, monitor, restart, stop."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.core import env
from penstock.server.launch.multi_node import MultiNode

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""First and maximum seconds before a restart; each pause doubles the previous one."""
SETTLED_SECONDS = 60.0
"""A process that has run for so many seconds counts as healthy: its restart counter is reset."""


@dataclass
class ManagedProcess:
    """A process and its children, in one process group."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    """Its environment variables besides the common ones, including secrets."""
    log: Callable[[str], None]
    most_deaths: int | None = None
    """Consecutive deaths after which it is not restarted; None: always restarted."""
    stop_seconds: float = 10.0  # Seconds to exit after a stop request before it is killed
    settled_seconds: float = SETTLED_SECONDS
    pass_env: Sequence[str] = ()  # Further variables of the launcher to pass on
    together: MultiNode = field(default_factory=MultiNode)
    """Coordination of restarts with other machines."""
    deaths: int = 0  # Consecutive deaths
    is_given_up: bool = False
    ended_well: bool = False  # Whether it exited with status 0 after a stop request
    _process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)
    _is_ending: bool = False
    _began: float = 0.0
    _again_at: float = 0.0

    def start(self) -> None:
        """Start it in its own process group, so that Ctrl-C only reaches the launcher."""
        self.together.started()
        self._began, self._is_ending = time.monotonic(), False
        self._process = subprocess.Popen(
            self.command,
            env=env.child_environment(self.environment, more=self.pass_env),
            # A background process group that reads the terminal is stopped by SIGTTIN.
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        self.log(f"{self.name} started (pid {self._process.pid})")

    def look(self) -> None:
        """Poll for its death, and restart it once the pause is over."""
        if self.is_given_up:
            return
        now = time.monotonic()
        if self._process is None:
            if now >= self._again_at and self.together.may_start():
                self.start()
            return
        status = self._process.poll()
        if status is None:
            if not self._is_ending and self.together.must_end():
                self._is_ending = True
                self.log(f"{self.name} of another machine ended, so these are ended too")
                self._process.terminate()
            return
        self._kill_group()
        self._process = None
        self.together.died()
        self.deaths = 1 if now - self._began >= self.settled_seconds else self.deaths + 1
        ended = f"ended with status {status}"
        if status < 0:
            # Of real-time signals `Signals` knows the first and the last alone.
            is_named = -status in set(signal.Signals)
            name = signal.Signals(-status).name if is_named else f"signal {-status}"
            ended = f"was ended by {name}"
        if self.most_deaths is not None and self.deaths > self.most_deaths:
            self.is_given_up = True
            self.log(f"{self.name} {ended}, {self.deaths} times in a row: not started again")
            return
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self.deaths - 1))
        self._again_at = now + pause
        self.log(f"{self.name} {ended}; started again in {pause:g} s")

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ask_to_end(self) -> None:
        """Request it to stop; it is not restarted."""
        self.is_given_up = True
        if self._process is not None and self.is_alive:
            self._process.terminate()

    def end(self, *, at_once: Callable[[], bool] = lambda: False) -> None:
        """Wait until it exits; kill it after `stop_seconds`, or when `at_once` returns True."""
        if self._process is None:
            return
        deadline = time.monotonic() + self.stop_seconds
        while self._process.poll() is None:
            if time.monotonic() > deadline or at_once():
                self.log(f"{self.name} did not end in time and is killed")
                break
            time.sleep(0.05)
        self.ended_well = self._process.poll() == 0
        self._kill_group()
        self._process.wait()
        self._process = None

    def _kill_group(self) -> None:
        # Orphaned children must not keep its port or its devices.
        assert self._process is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
