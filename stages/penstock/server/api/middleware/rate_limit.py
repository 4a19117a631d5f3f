"""How many requests an owner may make in a minute. Not how many may wait: futures count those."""

import time
from collections.abc import Callable

from penstock.server.api.errors import ApiError

MAX_OWNERS = 10_000
"""Buckets that are kept; full ones are forgotten first."""


class Rates:
    """A bucket for each owner, that a minute fills."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`per_minute` 0: nothing is counted."""
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, owner: str) -> None:
        """Count one request. Raises Refusal (429) with the seconds until one more is let in."""
        if not self._per_minute:
            return
        now = self._clock()
        left, then = self._buckets.pop(owner, (float(self._per_minute), now))
        left = min(self._per_minute, left + (now - then) * self._per_minute / 60)
        if left < 1:
            self._buckets[owner] = (left, now)
            raise ApiError(
                f"over {self._per_minute} requests within a minute; come again later",
                code="busy",
                retry_after=(1 - left) * 60 / self._per_minute,
            )
        self._buckets[owner] = (left - 1, now)
        if len(self._buckets) > MAX_OWNERS:
            self._buckets.pop(next(iter(self._buckets)))
