"""Asking a store again what a broken connection has cut short."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from penstock.core.remote_faults import StoreFault, fault_of

Result = TypeVar("Result")

PATIENT = 7
"""Tries while work is under way: about half a minute without a connection is survived."""

QUICK = 3
"""Tries while a run is planned: a person waits for the answer."""

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
"""Seconds before the second try, and before any later one; each pause doubles the last."""


def persistently(act: Callable[[], Result], *, tries: int = PATIENT) -> Result:
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
            kind = fault_of(error)
            if kind == "local":
                raise
            if kind != "cut" or not tries:
                # Its text may hold a signed URL, which a chained traceback would print.
                raise StoreFault(kind, error) from None
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(2 * pause, LONGEST_PAUSE)
