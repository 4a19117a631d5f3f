"""Connections are bounded in number and time, and those of who is known outlive those of others."""

import resource
import socket
import time
from contextlib import closing
from typing import Any

import httpx
import pytest

from penstock.server.api import connections, http_protocol
from penstock.server.api.connections import NOBODY, Connections, Phase
from penstock.server.api.errors import ApiError
from penstock.server.api.http_protocol import max_open_connections
from tests.server.api.engine_of_a_table import listening
from tests.server.api.requests_of_clients import ALICE, KEYS
from tests.waiting import soon


class Client:
    """A connection that is closed at once when it is to be."""

    def __init__(self, all_of_them, phase: Phase = "header"):
        self.owner: str = NOBODY
        self.phase: Phase = phase
        self.since: float = all_of_them.clock()
        self.paused_since: float | None = None
        self.is_open, self.closes = True, False
        all_of_them.admit(self)

    def is_closing(self):
        return self.closes

    def abort(self):
        self.is_open = False


def test_who_shows_no_key_is_closed_first_and_the_oldest_before_others():
    every = Connections(8)
    known = [Client(every) for _ in range(6)]
    for each in known:
        every.identify(each, "a")
    strangers = [Client(every) for _ in range(5)]
    assert all(each.is_open for each in known)
    assert [each.is_open for each in strangers] == [False, False, False, True, True]
    assert (len(every), every.evicted) == (8, 3)


def test_between_owners_places_are_shared_fairly():
    every = Connections(8)
    many = [Client(every, "request") for _ in range(6)]
    for each in many:
        every.identify(each, "a")
    more = Client(every)
    # No place is left but those of who is not known yet, and none of its own is idle.
    with pytest.raises(ApiError) as refused:
        every.identify(more, "a")
    assert refused.value.status_code == 429
    every.forget(more)
    other = Client(every)
    every.identify(other, "b")
    assert [each.is_open for each in many] == [False] + [True] * 5
    many[3].phase = "idle"
    another = Client(every)
    every.identify(another, "b")
    assert [each.is_open for each in many] == [False, True, True, False, True, True]
    assert other.is_open
    assert another.is_open


def test_who_takes_too_long_is_closed():
    now = [0.0]
    every = Connections(8, clock=lambda: now[0])
    seconds: dict[Phase, float] = {
        "header": connections.HEADER_SECONDS,
        "drain": connections.DRAIN_SECONDS,
    }
    idle, serving = Client(every, "idle"), Client(every, "request")
    for phase, limit in seconds.items():
        late = Client(every, phase)
        now[0] += limit
        every.sweep()
        assert late.is_open
        now[0] += 0.1
        every.sweep()
        assert [each.is_open for each in (late, idle, serving)] == [False, True, True]
    serving.paused_since, idle.closes = now[0], True
    every.sweep()
    now[0] += connections.CLOSE_SECONDS + 0.1
    every.sweep()
    assert (serving.is_open, idle.is_open) == (True, False)
    now[0] += connections.WRITE_SECONDS
    every.sweep()
    assert not serving.is_open


def test_as_many_connections_are_open_as_there_are_descriptors(monkeypatch):
    limits = [(1024, 20_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    assert max_open_connections(1024) == (1024, http_protocol.BACKLOG)
    assert limits[-1][0] > 1024 + http_protocol.BACKLOG
    limits[:] = [(256, 256)]
    most, backlog = max_open_connections(1024)
    assert most + 3 * backlog < 256 - 32
    assert most > 100


@pytest.fixture(scope="module")
def server():
    with listening(keys=KEYS, max_connections=12) as (url, engine):
        yield url, engine.app if engine.app else engine


def connected(url):
    return socket.create_connection((httpx.URL(url).host, httpx.URL(url).port), timeout=10)


def said(there, *parts):
    """What comes of these parts until the connection is closed, or silent for a moment."""
    for part in parts:
        there.sendall(part)
    there.settimeout(1.0)
    got = b""
    try:
        while piece := there.recv(65536):
            got += piece
    except (TimeoutError, ConnectionResetError):
        pass
    return got


def is_closed(there):
    there.settimeout(0.01)
    try:
        return there.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def asked(path="/api/v1/sessions", method="GET", **headers: Any):
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "X-API-Key: tml-of-alice"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_half_open_connections_keep_nobody_out(server):
    url, _ = server
    with httpx.Client(base_url=url, headers=ALICE, timeout=10) as http:
        assert http.get("/api/v1/sessions").status_code == 200
        half = [connected(url) for _ in range(40)]
        for there in half:
            there.sendall(b"GET /api/v1/sess")
        soon(lambda: sum(map(is_closed, half)) >= 28, 20)
        # The connection that was there, and one that comes new.
        assert http.get("/api/v1/sessions").status_code == 200
        assert httpx.get(f"{url}/api/v1/sessions", headers=ALICE).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
        for there in half:
            there.close()


def test_a_request_that_others_might_read_otherwise_is_refused(server):
    url, _ = server
    body = b"5\r\nhello\r\n0\r\n\r\n"
    wrong = [
        asked(method="POST", Content_Length=4, Transfer_Encoding="chunked") + body,
        asked(method="POST", Transfer_Encoding="chunked, identity") + body,
        asked(method="POST", Content_Length="4\r\nContent-Length: 5") + b"hello",
        asked(method="POST", Content_Length="+4") + b"helo",
        asked(method="POST", Content_Length="4 4") + b"helo",
        asked().replace(b"Host: x", b"Host : x"),
        asked().replace(b"Host: x", b"X: a\x00b"),
    ]
    for request in wrong:
        with closing(connected(url)) as there:
            got = said(there, request)
            assert got.startswith(b"HTTP/1.1 400"), request
            assert got.count(b"HTTP/1.1") == 1


def test_a_header_without_end_is_broken_off(server):
    url, _ = server
    with closing(connected(url)) as there:
        got = said(there, asked().replace(b"Host: x", b"Host: x" + b"\r\nX: 1" * 200))
        assert got.startswith(b"HTTP/1.1 400")
    for start in (b"GET /?q=", b"GET / HTTP/1.1\r\nHost: x\r\nX: "):
        with closing(connected(url)) as there:
            there.sendall(start)
            try:
                for _ in range(100):
                    there.sendall(b"a" * 65536)
            except OSError:
                continue
            assert is_closed(there)


@pytest.mark.slow
def test_so_many_requests_wait_on_one_connection_and_no_more(server):
    url, _ = server
    with closing(connected(url)) as there:
        assert said(there, asked() * 5).count(b"HTTP/1.1 200") == 5
    with closing(connected(url)) as there:
        assert said(there, asked() * 500).count(b"HTTP/1.1 200") < 100
        assert is_closed(there)


def test_a_connection_that_asks_for_another_protocol_is_served_once(server):
    url, _ = server
    with closing(connected(url)) as there:
        upgrade = asked(Connection="Upgrade", Upgrade="websocket", Sec_WebSocket_Version=13)
        # In one piece: bytes that come after the end would have it reset, and the answer lost.
        got = said(there, upgrade + b"\x81\x05hello" + asked())
        assert got.startswith(b"HTTP/1.1 200")
        assert got.count(b"HTTP/1.1") == 1


def test_a_client_that_goes_within_its_request_leaves_nothing(server):
    url, _ = server
    for _ in range(20):
        with closing(connected(url)) as there:
            there.sendall(
                asked(
                    "/api/v1/forward_backward",
                    "POST",
                    Content_Length=100_000,
                    Content_Type="application/json",
                )
                + b" " * 50_000
            )
    with closing(connected(url)) as there:
        there.sendall(asked("/api/v1/retrieve_future", "POST", Content_Length=1000))
    deadline, text = time.monotonic() + 10, ""
    with httpx.Client(base_url=url, headers=ALICE) as http:
        while time.monotonic() < deadline:
            text = http.get("/metrics").text
            if 'status="400"' in text:
                break
        assert 'route="/api/v1/forward_backward",status="400"' in text
        assert 'status="500"' not in text
