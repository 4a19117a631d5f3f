"""Doing again what a broken connection, or another fault that may pass, has cut short."""

import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.core.errors import PenstockError
from penstock.core.remote.errors import StorageError, classify_error, is_transient

Result = TypeVar("Result")

PATIENT = 7
"""Tries while work is under way: about half a minute without a connection is survived."""

QUICK = 3
"""Tries while a run is planned: a person waits for the answer."""

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
"""Seconds before the second try, and before any later one; each pause doubles the last."""


def backoff_seconds(tries: int, first: float) -> list[float]:
    """Seconds before each of `tries` further tries; each doubles the one before."""
    return [first * 2**number for number in range(tries)]


def retry_with_backoff(
    act: Callable[[], Result], pauses: Sequence[float], notify: Callable[[str], None]
) -> Result:
    """What `act` returns; after each of the pauses it is called again if its fault may pass.

    Machines that work together pause alike, so that they meet again: chance has no part in it.
    """
    for seconds in pauses:
        try:
            return act()
        except PenstockError as error:
            if not is_transient(error):
                raise
            notify(f"{error}\n  This may pass: it is tried again in {seconds:g} s.")
        time.sleep(seconds)
    return act()


def retry_until_connected(act: Callable[[], Result], *, tries: int = PATIENT) -> Result:
    """What `act` returns; it is called again while a connection cuts it short.

    Raises StoreFault for what trying again does not mend, and OSError where this machine's own
    disk is at fault.
    """
    pause = FIRST_PAUSE
    while True:
        tries -= 1
        try:
            return act()
        except Exception as error:
            kind = classify_error(error)
            if kind == "local":
                raise
            if kind != "cut" or not tries:
                # Its text may hold a signed URL, which a chained traceback would print.
                raise StorageError(kind, error) from None
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(2 * pause, LONGEST_PAUSE)
