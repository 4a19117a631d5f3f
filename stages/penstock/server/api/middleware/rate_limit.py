"""Rate limit: requests per minute and owner. Pending requests are limited by `futures`."""

import time

from penstock.server.api.errors import ApiError

MAX_OWNERS = 10_000  # Maximum number of buckets; full ones are dropped first


class RateLimit:
    """Token buckets, one per owner, refilled per minute."""

    def __init__(self, per_minute: int) -> None:
        """`per_minute` 0 disables the limit."""
        self._per_minute = per_minute
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, owner: str) -> None:
        """Count a request. Raises ApiError (429) with the seconds until the next is allowed."""
        if not self._per_minute:
            return
        now = time.monotonic()
        # Removed and inserted again, so that the first bucket is the least recently used one.
        tokens, then = self._buckets.pop(owner, (float(self._per_minute), now))
        tokens = min(self._per_minute, tokens + (now - then) * self._per_minute / 60)
        if tokens < 1:
            self._buckets[owner] = (tokens, now)
            raise ApiError(
                f"over {self._per_minute} requests within a minute; come again later",
                code="busy",
                retry_after=(1 - tokens) * 60 / self._per_minute,
            )
        self._buckets[owner] = (tokens - 1, now)
        if len(self._buckets) > MAX_OWNERS:
            self._buckets.pop(next(iter(self._buckets)))
