"""A process of the server as its launcher sees it: started, looked at, started again, ended."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.core import env
from penstock.server.launch.multi_node import MultiNode, SingleNode

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a process is started again; each pause doubles the one before."""
SETTLED_SECONDS = 60.0
"""A process that has lived so long has started well: its earlier deaths do not count any more."""


@dataclass
class ManagedProcess:
    """One process and what it starts; all of it is one group."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    """What it gets beside what any process does; secrets among it."""
    say: Callable[[str], None]
    most_deaths: int | None = None
    """In a row, after which it is not started again; None: always again."""
    stop_seconds: float = 10.0
    """How long it may take to end when it is asked to."""
    settled_seconds: float = SETTLED_SECONDS
    pass_env: Sequence[str] = ()
    """Variables of the launcher that it gets besides."""
    together: MultiNode = field(default_factory=SingleNode)
    """With what other machines it starts and ends."""
    deaths: int = 0
    """In a row."""
    is_given_up: bool = False
    ended_well: bool = False
    """When it was asked to end: by itself, with status 0."""
    _process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)
    _is_ending: bool = False
    _began: float = 0.0
    _again_at: float = 0.0

    def start(self) -> None:
        """Start it; in a group of its own, so that a Ctrl-C reaches the launcher alone."""
        self.together.started()
        self._began, self._is_ending = time.monotonic(), False
        self._process = subprocess.Popen(
            self.command,
            env=env.child_environment(self.environment, more=self.pass_env),
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        self.say(f"{self.name} started (pid {self._process.pid})")

    def look(self) -> None:
        """Note a death, and start it again once its pause is over."""
        if self.is_given_up:
            return
        now = time.monotonic()
        if self._process is None:
            if now >= self._again_at and self.together.may_start():
                self.start()
            return
        status = self._process.poll()
        if status is None:
            self._end_with_others()
            return
        self._kill_group()
        self._process = None
        self.together.died()
        self.deaths = 1 if now - self._began >= self.settled_seconds else self.deaths + 1
        ended = _ending(status)
        if self.most_deaths is not None and self.deaths > self.most_deaths:
            self.is_given_up = True
            self.say(f"{self.name} {ended}, {self.deaths} times in a row: not started again")
            return
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self.deaths - 1))
        self._again_at = now + pause
        self.say(f"{self.name} {ended}; started again in {pause:g} s")

    def _end_with_others(self) -> None:
        assert self._process is not None
        if not self._is_ending and self.together.must_end():
            self._is_ending = True
            self.say(f"{self.name} of another machine ended, so these are ended too")
            self._process.terminate()

    @property
    def is_alive(self) -> bool:
        """Whether its first process is there."""
        return self._process is not None and self._process.poll() is None

    def ask_to_end(self) -> None:
        """Ask it to end; it is not started again."""
        self.is_given_up = True
        if self._process is not None and self.is_alive:
            self._process.terminate()

    def end(self, *, at_once: Callable[[], bool] = lambda: False) -> None:
        """Wait until it has ended, and kill it after `stop_seconds`, or when `at_once` says so."""
        if self._process is None:
            return
        deadline = time.monotonic() + self.stop_seconds
        while self._process.poll() is None:
            if time.monotonic() > deadline or at_once():
                self.say(f"{self.name} did not end in time and is killed")
                break
            time.sleep(0.05)
        self.ended_well = self._process.poll() == 0
        self._kill_group()
        self._process.wait()
        self._process = None

    def _kill_group(self) -> None:
        """What it has started and left behind must not hold its port or its devices."""
        assert self._process is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
