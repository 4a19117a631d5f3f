"""Connections of clients: how many may be open, and which is closed when there are too many.

Who has not shown a key is closed first, the oldest before others; places are reserved for those
who come. Between owners the places are shared fairly: whoever has most gives up one.
"""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal, Protocol

from penstock.server.api.errors import ApiError

Phase = Literal["header", "request", "drain", "idle"]
"""A request's header is awaited; it is served; the rest of a body that was refused comes yet; or
nothing is asked."""

SWEEP_SECONDS = 0.5
HEADER_SECONDS = 10.0
"""In which the header of a request arrives, from its first byte, or from the connection on."""
DRAIN_SECONDS = 5.0
"""In which the rest of a body arrives that was refused already."""
WRITE_SECONDS = 30.0
"""In which a client takes some more of an answer."""
CLOSE_SECONDS = 5.0
"""In which it takes the rest of the last one."""
PHASE_SECONDS: dict[Phase, float] = {"header": HEADER_SECONDS, "drain": DRAIN_SECONDS}
NOBODY = ""
"""The owner of a connection that has shown no key."""


class Client(Protocol):
    """One connection."""

    owner: str
    phase: Phase
    since: float
    """When the phase began."""
    paused_since: float | None
    """Since when the client takes nothing more of an answer."""

    def is_closing(self) -> bool:
        """Whether it was closed, and something is still to be sent."""
        ...

    def abort(self) -> None:
        """Close it at once."""
        ...


class Connections:
    """All that are open."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit`: how many may be; a quarter of it is reserved for those without a key yet."""
        self.limit = limit
        self.clock = clock
        self._reserved = max(1, limit // 4)
        self._open: dict[Client, None] = {}
        self._by_owner: Counter[str] = Counter()
        self._closing: dict[Client, float] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self.evicted = 0
        """How many were closed because there were too many."""

    def __len__(self) -> int:
        return len(self._open)

    def start(self) -> None:
        """Close those that take too long, until `stop`."""
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Close no more."""
        if self._sweeper:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper

    def admit(self, client: Client) -> None:
        """One more is open. Another is closed where that is too many, or this one."""
        client.owner = NOBODY
        self._open[client] = None
        self._by_owner[NOBODY] += 1
        if len(self._open) <= self.limit:
            return
        unknown = (each for each in self._open if each.owner == NOBODY and each is not client)
        self._evict(next(unknown, None) or self._idle_of_largest() or client)

    def identify(self, client: Client, owner: str) -> None:
        """A request of this owner came by it.

        Raises Refusal (429) where the owner has most of all that may be, and none of them is idle.
        """
        if client not in self._open:
            return
        if client.owner != owner:
            self._move(client, owner)
        known = len(self._open) - self._by_owner[NOBODY]
        if known <= self.limit - self._reserved:
            return
        victim = self._idle_of_largest(but=client)
        if victim is None and (largest := self._largest()) != owner:
            victim = next(each for each in self._open if each.owner == largest)
        if victim is None:
            raise ApiError(
                f"{self._by_owner[owner]} connections of yours are open, and"
                f" {self.limit - self._reserved} may be of all; close some, and come again",
                code="busy",
                retry_after=1.0,
            )
        self._evict(victim)

    def forget(self, client: Client) -> None:
        """It is closed."""
        self._closing.pop(client, None)
        if self._open.pop(client, 0) is None:
            self._count(client.owner, -1)

    def sweep(self) -> None:
        """Close those that take too long."""
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

    def _evict(self, client: Client) -> None:
        self.evicted += 1
        self.forget(client)
        client.abort()

    def _idle_of_largest(self, but: Client | None = None) -> Client | None:
        """The oldest connection of the owner with most of them on which nothing is asked."""
        largest = self._largest()
        own = (each for each in self._open if each.owner == largest and each is not but)
        return next((each for each in own if each.phase == "idle"), None)

    def _largest(self) -> str | None:
        known = (item for item in self._by_owner.most_common(2) if item[0] != NOBODY)
        return next((owner for owner, _ in known), None)

    def _move(self, client: Client, owner: str) -> None:
        self._count(client.owner, -1)
        client.owner = owner
        self._count(owner, 1)

    def _count(self, owner: str, change: int) -> None:
        self._by_owner[owner] += change
        if not self._by_owner[owner]:
            del self._by_owner[owner]

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()
