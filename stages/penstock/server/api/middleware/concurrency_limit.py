"""Turns: a burst of requests is served a few at a time, so that heartbeats do not stand behind it.

An event loop runs all that is ready before it looks at its sockets again. When a batch of drawing
ends, hundreds of polls are ready at once, and as many new requests follow them.
"""

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

URGENT = ("/api/v1/session_heartbeat", "/health", "/api/v1/health", "/api/v1/healthz")
"""Paths of what tells who lives: served before others that came earlier."""

AT_ONCE = 4
"""Requests that begin, or are answered, between two looks at the sockets."""


class ConcurrencyLimit:
    """Who waits for one, in the order in which they came. Of one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._given = 0

    async def take(self) -> None:
        """Wait for a turn."""
        loop = asyncio.get_running_loop()
        if not self._given:
            loop.call_soon(self._give)
        if self._given < AT_ONCE:
            self._given += 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _give(self) -> None:
        """The next few, once the loop has looked at its sockets."""
        self._given = 0
        while self._waiting and self._given < AT_ONCE:
            turn = self._waiting.popleft()
            # Who does not wait any more was cancelled.
            if not turn.done():
                turn.set_result(None)
                self._given += 1
        if self._given:
            asyncio.get_running_loop().call_soon(self._give)


class ConcurrencyLimitMiddleware:
    """An application whose requests wait for their turns, but for those that are urgent."""

    def __init__(self, app: ASGIApp, turns: ConcurrencyLimit) -> None:
        self._app = app
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and scope["path"] not in URGENT:
            await self._turns.take()
        await self._app(scope, receive, send)
