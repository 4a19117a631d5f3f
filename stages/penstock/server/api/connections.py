"""Connection limit: closes connections when too many are open.

Connections without a valid API key are closed first, oldest first; some places are reserved for new
connections. Owners share the limit fairly: the owner with the most connections loses one.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal, Protocol

from penstock.server.api.errors import ApiError

Phase = Literal["header", "request", "drain", "idle"]
"""Waiting for the header; handling the request; discarding the rest of a rejected body; idle."""

SWEEP_SECONDS = 0.5
HEADER_SECONDS = 10.0
"""Timeout in seconds for a request header, from its first byte or from the connection's start."""
DRAIN_SECONDS = 5.0  # Timeout in seconds for the rest of a rejected body
WRITE_SECONDS = 30.0  # Timeout in seconds for the client to read more of a response
CLOSE_SECONDS = 5.0  # Timeout in seconds for the client to read the rest of the last response
PHASE_SECONDS: dict[Phase, float] = {"header": HEADER_SECONDS, "drain": DRAIN_SECONDS}
NOBODY = ""  # The owner of a connection without an API key


class Client(Protocol):
    """One connection."""

    owner: str
    phase: Phase
    since: float  # Start time of the phase
    paused_since: float | None  # Start time of write backpressure: the client has not read since

    def is_closing(self) -> bool:
        """Whether it was closed with data still to be sent."""
        ...

    def abort(self) -> None: ...


class Connections:
    """All open connections."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit`: maximum number; a quarter is reserved for connections without a key yet."""
        self.limit = limit
        self.clock = clock
        self._reserved = max(1, limit // 4)
        self._open: dict[Client, None] = {}
        self._by_owner: Counter[str] = Counter()
        self._closing: dict[Client, float] = {}
        self.evicted = 0  # Number of connections closed because of the limit

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, client: Client) -> None:
        """Register a new connection. Above the limit, another one or this one is closed."""
        client.owner = NOBODY
        self._open[client] = None
        self._by_owner[NOBODY] += 1
        if len(self._open) <= self.limit:
            return
        unidentified = (
            connection
            for connection in self._open
            if connection.owner == NOBODY and connection is not client
        )
        self._evict(next(unidentified, None) or self._idle_of_largest() or client)

    def identify(self, client: Client, owner: str) -> None:
        """Register a request of this owner on the connection. Raises ApiError (429) if the owner
        has the most connections at the limit, and none of them is idle."""
        if client not in self._open:
            return
        if client.owner != owner:
            self._count(client.owner, -1)
            client.owner = owner
            self._count(owner, 1)
        identified = len(self._open) - self._by_owner[NOBODY]
        if identified <= self.limit - self._reserved:
            return
        victim = self._idle_of_largest(but=client)
        if victim is None and (largest := self._largest()) != owner:
            victim = next(connection for connection in self._open if connection.owner == largest)
        if victim is None:
            raise ApiError(
                f"{self._by_owner[owner]} connections of yours are open, and"
                f" {self.limit - self._reserved} may be of all; close some, and come again",
                code="busy",
            )
        self._evict(victim)

    def forget(self, client: Client) -> None:
        self._closing.pop(client, None)
        # All values are None, so 0 means that it was not open.
        if self._open.pop(client, 0) is None:
            self._count(client.owner, -1)

    def sweep(self) -> None:
        now = self.clock()
        for client in list(self._open):
            if client.is_closing():
                since, limit = self._closing.setdefault(client, now), CLOSE_SECONDS
            elif client.paused_since is not None:
                since, limit = client.paused_since, WRITE_SECONDS
            else:
                since, limit = client.since, PHASE_SECONDS.get(client.phase, math.inf)
            if now - since > limit:
                client.abort()

    async def sweep_periodically(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def _evict(self, client: Client) -> None:
        self.evicted += 1
        self.forget(client)
        client.abort()

    def _idle_of_largest(self, but: Client | None = None) -> Client | None:
        """The oldest idle connection of the owner with the most connections."""
        largest = self._largest()
        own = (
            connection
            for connection in self._open
            if connection.owner == largest and connection is not but
        )
        return next((connection for connection in own if connection.phase == "idle"), None)

    def _largest(self) -> str | None:
        # Two, because one of them may be NOBODY.
        owners = (item for item in self._by_owner.most_common(2) if item[0] != NOBODY)
        return next((owner for owner, _ in owners), None)

    def _count(self, owner: str, change: int) -> None:
        self._by_owner[owner] += change
        if not self._by_owner[owner]:
            del self._by_owner[owner]
