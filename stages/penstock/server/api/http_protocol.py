"""HTTP/1.1 protocol of uvicorn with limits for clients that are not yet authenticated."""

import asyncio
import resource
from typing import Any

from fastapi import Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.server.api.connections import NOBODY, Client, Connections, Phase

MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 100
MAX_PIPELINED = 8  # Maximum number of pipelined requests per connection
EXTENSION = "penstock.connection"  # Scope key of a request's connection
FILES = 64  # File descriptors of the process besides its connections
BACKLOG, SMALL_BACKLOG = 128, 16  # Listen backlog, for a large and for a small descriptor limit
ROUNDS = 3  # Event loop iterations from accepting a connection until it or another one is closed


class Connection(HttpToolsProtocol):
    """One connection."""

    def __init__(self, connections: Connections, **uvicorns: Any) -> None:
        """`uvicorns` are uvicorn's own arguments."""
        super().__init__(**uvicorns)
        self._connections = connections
        self.owner = NOBODY
        self.phase: Phase = "header"
        self.since = connections.clock()
        self.paused_since: float | None = None
        self._header_bytes = 0
        self._has_message = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._connections.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.phase == "idle":
            self._enter("header")
        if self.phase == "header":
            self._header_bytes += len(data)
        super().data_received(data)
        if self.phase == "header" and self._header_bytes > MAX_HEADER_BYTES:
            self.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_message, self._header_bytes = False, 0
        # ASGI's place for what a server adds; uvicorn makes a new scope for each request.
        self.scope["extensions"] = {EXTENSION: self}  # pyright: ignore[reportGeneralTypeIssues]

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self.abort()
            return
        self._enter("request")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_message = True
        if self.phase == "drain":
            self._enter("idle")
        if self.cycle is not None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        is_next = bool(self.pipeline)
        super().on_response_complete()
        if not self.transport.is_closing() and not is_next:
            self._enter("idle" if self._has_message else "drain")

    def pause_writing(self) -> None:
        self.paused_since = self._connections.clock()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.paused_since = None
        super().resume_writing()

    def is_closing(self) -> bool:
        return self.transport.is_closing()

    def abort(self) -> None:
        # Not close(), which waits until what is buffered is sent: a client may never read it.
        self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        # Upgrades are not supported: serve the request as HTTP/1.1 and read nothing after it.
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _enter(self, phase: Phase) -> None:
        self.phase, self.since = phase, self._connections.clock()
        if phase == "header":
            self._header_bytes = 0

    def _count(self, count: int) -> None:
        self._header_bytes += count
        # Twice the limit: after the first chunk `data_received` has counted the same bytes, too.
        too_many = self.headers is not None and len(self.headers) >= MAX_HEADERS
        if self._header_bytes > 2 * MAX_HEADER_BYTES or too_many:
            # httptools makes an HttpParserCallbackError of it, which uvicorn answers with 400.
            raise ValueError("the header of a request is too long")


def get_connection(request: Request) -> Client | None:
    """The connection of a request; None without a socket."""
    return request.scope.get("extensions", {}).get(EXTENSION)


def max_open_connections(limit: int) -> tuple[int, int]:
    """Number of open connections that the file descriptor limit allows, at most `limit`, and the
    listen backlog. The descriptor limit is raised as far as permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = limit + FILES + ROUNDS * BACKLOG
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return limit, BACKLOG
    available = soft - FILES - ROUNDS * SMALL_BACKLOG
    return max(4, min(limit, available)), SMALL_BACKLOG
