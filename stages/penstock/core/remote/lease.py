"""One writer per folder on an object store, where there are no locks.

Leases are numbered objects, each created by a conditional write that one of several wins; the
highest number holds. Its owner rewrites it every few seconds. Whoever sees it unchanged for a whole
term, by his own clock, creates the next number and holds from then on; an owner that comes back
finds a higher number and has lost. So no clocks are compared, and nothing is needed of the store
but exclusive creation (S3 and its likes, Google, Azure). Where creation is not exclusive, two
writers are still told apart unless they begin within the same round trip.
"""

import contextlib
import json
import platform
import threading
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any, cast

from penstock.core.errors import PenstockError, StageError
from penstock.core.remote.path import RemotePath

LEASES = ".leases"
"""Folder of the leases, inside the folder they guard."""

TERM = 45.0
"""Seconds an unchanged lease is honoured."""

RENEWALS = 5
"""How often in a term the owner shows that it lives."""

POLL = 1.0
"""Seconds between looks at a lease that another holds."""


class Lease:
    """The right to write a folder. `holder` is a word for this machine's mirror of the folder.

    A lease of the same holder is taken over at once: whoever holds the mirror's own lock knows that
    no other process here is alive with it.
    """

    def __init__(self, folder: RemotePath, holder: str, term: float = TERM) -> None:
        self._leases = folder / LEASES
        self._folder = folder
        self._holder = holder
        self._term = term
        self._token = uuid.uuid4().hex
        self._number = 0
        self._beat = 0
        self._ended = threading.Event()
        self._pulse: threading.Thread | None = None
        self._lost = False

    def take(self, done: Callable[[], bool], notify: Callable[[str], None]) -> bool:
        """Wait for the lease and return True, or False once `done` says that nobody needs it."""
        seen, since, said = None, time.monotonic(), False
        while True:
            number, record = self._highest()
            if self._is_free(record):
                if self._claim(number + 1):
                    return True
                continue
            if record != seen:
                seen, since = record, time.monotonic()
            elif time.monotonic() - since > self._term:
                if self._claim(number + 1):
                    return True
                continue
            if not said:
                host = (record or {}).get("host", "another machine")
                notify(f"{self._folder.said} is being built on {host}; waiting for it")
                said = True
            time.sleep(min(POLL, self._term / 4))
            if done():
                return False

    def check(self) -> None:
        """Raise StageError if another has taken over meanwhile."""
        if self._lost or self._highest()[0] != self._number:
            self._lost = True
            failure = StageError(
                f"{self._folder.said} was taken over by another machine while this one could not "
                "be heard.\n  Run it again: what the other one builds is reused."
            )
            failure.may_pass = True
            raise failure

    def release(self) -> None:
        """Let the next one in without waiting."""
        self._stop()
        if not self._lost:
            with contextlib.suppress(PenstockError):
                self._write("released")

    def clear(self) -> None:
        """Remove all leases: what they guarded is sealed, and every comer sees that first."""
        self._stop()
        for name in self._leases.files():
            (self._leases / name).delete()

    def __enter__(self) -> "Lease":
        """Hold a taken lease: from now on it is renewed."""
        self._pulse = threading.Thread(target=self._renew, name="penstock-lease", daemon=True)
        self._pulse.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release it, unless it was cleared."""
        if not self._ended.is_set():
            self.release()

    def _highest(self) -> tuple[int, dict[str, Any] | None]:
        """The number of the lease that holds and what it says; 0 where there is none."""
        numbers = [int(name) for name in self._leases.files() if name.isdigit()]
        if not numbers:
            return 0, None
        content = (self._leases / _name(max(numbers))).read()
        return max(numbers), _parsed(content) if content else None

    def _is_free(self, record: dict[str, Any] | None) -> bool:
        if record is None:
            return True
        return record.get("state") == "released" or record.get("holder") == self._holder

    def _claim(self, number: int) -> bool:
        """Create the lease of that number; True if this one did and none is higher."""
        self._number = number
        if not (self._leases / _name(number)).create(self._content("held")):
            return False
        names = [name for name in self._leases.files() if name.isdigit()]
        if max(map(int, names), default=0) != number:
            return False
        for name in names:
            if int(name) < number:
                (self._leases / name).delete()
        return True

    def _renew(self) -> None:
        while not self._ended.wait(self._term / RENEWALS):
            with contextlib.suppress(PenstockError):
                if self._highest()[0] != self._number:
                    self._lost = True
                    return
                self._write("held")

    def _write(self, state: str) -> None:
        self._beat += 1
        (self._leases / _name(self._number)).write(self._content(state))

    def _content(self, state: str) -> bytes:
        record = {
            "state": state,
            "holder": self._holder,
            "token": self._token,
            "beat": self._beat,
            "host": platform.node(),
        }
        return json.dumps(record, sort_keys=True).encode()

    def _stop(self) -> None:
        self._ended.set()
        if self._pulse:
            self._pulse.join()


def _parsed(content: bytes) -> dict[str, Any]:
    """What a lease says; of a damaged one only that, so that its term is waited for."""
    try:
        record = json.loads(content)
    except ValueError:
        record = None
    return cast("dict[str, Any]", record) if isinstance(record, dict) else {"damaged": True}


def _name(number: int) -> str:
    return f"{number:08}"
