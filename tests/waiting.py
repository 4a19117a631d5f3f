"""Waiting for what other processes do."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def soon(look: Callable[[], T | None], seconds: float = 120, *, every: float = 0.1) -> T:
    """What `look` gives once it gives something; fails if that takes too long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(every)
    raise AssertionError(f"not within {seconds} seconds")
