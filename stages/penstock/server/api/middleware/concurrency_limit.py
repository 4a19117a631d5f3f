"""Concurrency limit: a burst of requests is served a few at a time, so that heartbeats are not
delayed.

An event loop runs everything that is ready before it polls its sockets again. When a batch of
sampling requests ends, hundreds of polls are ready at once, followed by as many new requests.
"""

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

URGENT = ("/api/v1/session_heartbeat", "/health", "/api/v1/health", "/api/v1/healthz")
"""Liveness paths, which bypass the queue."""

AT_ONCE = 4  # Requests that start or are answered per event loop iteration


class ConcurrencyLimit:
    """FIFO queue of waiting requests. For one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._given = 0

    async def take(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._given:
            loop.call_soon(self._give)
        if self._given < AT_ONCE:
            self._given += 1
            return
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _give(self) -> None:
        """Release the next few requests after the loop has polled its sockets."""
        self._given = 0
        while self._waiting and self._given < AT_ONCE:
            waiter = self._waiting.popleft()
            # Skip requests that were cancelled while waiting.
            if not waiter.done():
                waiter.set_result(None)
                self._given += 1
        if self._given:
            asyncio.get_running_loop().call_soon(self._give)


class ConcurrencyLimitMiddleware:
    """ASGI middleware that limits the concurrency of all requests except urgent ones."""

    def __init__(self, app: ASGIApp, concurrency: ConcurrencyLimit) -> None:
        self._app = app
        self._concurrency = concurrency

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in URGENT:
            await self._concurrency.take()
        await self._app(scope, receive, send)
