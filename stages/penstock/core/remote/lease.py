"""Write leases on an object store, which has no locks: one writer per folder.

Leases are numbered objects, each created by a conditional write that only one of several writers
wins; the highest number is valid. Its owner rewrites it every few seconds. A waiting process that
sees it unchanged for a whole term, by its own clock, creates the next number and becomes the owner.
A former owner that returns finds a higher number and has lost the lease. No clocks are compared
across machines, and the store only needs exclusive creation (S3 and compatible stores, Google,
Azure). Without exclusive creation, two writers are still detected unless they start within the same
round trip.
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

LEASES = ".leases"  # Folder of the leases, inside the folder that they protect

TERM = 45.0  # Seconds after which an unchanged lease expires

RENEWALS = 5  # Renewals per term

POLL = 1.0  # Seconds between polls of a lease that another process holds


class Lease:
    """The write lease of a folder. `holder` identifies this machine's mirror of the folder.

    A lease of the same holder is taken over at once: the owner of the mirror's local lock knows
    that no other process on this machine uses it.
    """

    def __init__(self, folder: RemotePath, holder: str, term: float = TERM) -> None:
        self._leases = folder / LEASES
        self._folder = folder
        self._holder = holder
        self._term = term
        self._token = uuid.uuid4().hex
        self._number = 0
        self._num_renewals = 0
        self._stop_event = threading.Event()
        self._renewal_thread: threading.Thread | None = None
        self._lost = False

    def acquire(self, done: Callable[[], bool], notify: Callable[[str], None]) -> bool:
        """Wait for the lease and return True, or return False once `done` returns True."""
        last_seen, since, is_notified = None, time.monotonic(), False
        while True:
            number, record = self._highest()
            if record != last_seen:
                last_seen, since = record, time.monotonic()
            # No record: no lease, or its owner deleted it between the listing and the read.
            if record is None or self._is_free(record) or time.monotonic() - since > self._term:
                if self._claim(number + 1):
                    return True
                continue
            if not is_notified:
                host = record.get("host", "another machine")
                notify(f"{self._folder.redacted_url} is being built on {host}; waiting for it")
                is_notified = True
            time.sleep(min(POLL, self._term / 4))
            if done():
                return False

    def check(self) -> None:
        """Raise StageError if another process has taken the lease."""
        if self._lost or self._highest()[0] != self._number:
            self._lost = True
            failure = StageError(
                f"{self._folder.redacted_url} was taken over by another machine because this one "
                "did not renew its lease.\n  Run it again: the other machine's result is reused."
            )
            failure.may_pass = True
            raise failure

    def release(self) -> None:
        """Release the lease, so that the next process need not wait for its expiry."""
        self._stop()
        if not self._lost:
            with contextlib.suppress(PenstockError):
                self._write("released")

    def clear(self) -> None:
        """Delete all leases. The artifact is complete, and every process checks that first."""
        self._stop()
        for name in self._leases.files():
            (self._leases / name).delete()

    def __enter__(self) -> "Lease":
        self._renewal_thread = threading.Thread(
            target=self._renew, name="penstock-lease", daemon=True
        )
        self._renewal_thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._stop_event.is_set():
            self.release()

    def _highest(self) -> tuple[int, dict[str, Any] | None]:
        """The highest lease number and its content; 0 if there is none."""
        numbers = [int(name) for name in self._leases.files() if name.isdigit()]
        if not numbers:
            return 0, None
        content = (self._leases / _name(max(numbers))).read()
        return max(numbers), _parse(content) if content else None

    def _is_free(self, record: dict[str, Any]) -> bool:
        return record.get("state") == "released" or record.get("holder") == self._holder

    def _claim(self, number: int) -> bool:
        """Create the lease of that number; True if this process did and no higher number exists."""
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
        # A failed renewal is repeated after a fraction of the term, which has room for some of
        # them.
        while not self._stop_event.wait(self._term / RENEWALS):
            with contextlib.suppress(PenstockError):
                if self._highest()[0] != self._number:
                    self._lost = True
                    return
                self._write("held")

    def _write(self, state: str) -> None:
        self._num_renewals += 1
        (self._leases / _name(self._number)).write(self._content(state))

    def _content(self, state: str) -> bytes:
        record = {
            "state": state,
            "holder": self._holder,
            "token": self._token,
            # Each renewal is another content, by which those who wait see that the owner lives.
            "beat": self._num_renewals,
            "host": platform.node(),
        }
        return json.dumps(record, sort_keys=True).encode()

    def _stop(self) -> None:
        self._stop_event.set()
        if self._renewal_thread:
            self._renewal_thread.join()


def _parse(content: bytes) -> dict[str, Any]:
    """Parse a lease. A damaged lease is reported as such, so that its term is waited for."""
    try:
        record = json.loads(content)
    except (ValueError, RecursionError):
        record = None
    return cast("dict[str, Any]", record) if isinstance(record, dict) else {"damaged": True}


def _name(number: int) -> str:
    return f"{number:08}"
