"""Servers on loopback that behave as badly as real ones do."""

import contextlib
import http.server
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest


class WebServer(http.server.ThreadingHTTPServer):
    """Serves `files` from memory; `manners` says how."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Files)
        self.files: dict[str, bytes] = {}
        self.manners: dict[str, Any] = {"ETag": '"1"'}
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.before: Callable[[WebServer], None] | None = None
        """Called with the server before each answer."""
        self.within: Callable[[WebServer, bytes], bytes] | None = None
        """Called in the middle of each body; returns the body from there on."""


class Files(http.server.BaseHTTPRequestHandler):
    """One request for one file."""

    server: WebServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, *, with_body):  # noqa: C901
        self.server.requests.append((self.command, self.path, dict(self.headers)))
        if self.server.before:
            self.server.before(self.server)
        manners, parts = self.server.manners, urlsplit(self.path)
        content = self.server.files.get(parts.path)
        if manners.get("signature") not in (None, parse_qs(parts.query).get("signature", [""])[0]):
            self.send_error(403)
            return
        if location := manners.get("redirects", {}).get(parts.path):
            self.send_response(302)
            self.send_header("Location", location)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if manners.get("refusals"):
            status, headers = manners["refusals"].pop(0)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if content is None:
            self.send_error(404)
            return
        tag = self.headers.get("If-Match")
        if manners.get("conditions", True) and tag not in (None, manners.get("ETag")):
            self.send_error(412)
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, stop = 0, len(content)
        if asked and manners.get("ranges", True):
            start = int(asked[1]) + (manners.get("shift", 0) if int(asked[1]) else 0)
            stop = min(len(content), int(asked[2]) + 1) if asked[2] else len(content)
            self.send_response(206)
            if manners.get("says range", True):
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        else:
            self.send_response(200)
        for name in ("ETag", "Last-Modified"):
            if name in manners:
                self.send_header(name, manners[name])
        body = content[start:stop] + bytes(manners.get("more", 0))
        length = len(body)
        if self.command == "HEAD" and manners.get("halves HEAD"):
            length //= 2
        if manners.get("length", True):
            self.send_header("Content-Length", str(length))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self._send(body if with_body else b"")
            while manners.get("endless"):
                self.wfile.write(bytes(1 << 20))

    def _send(self, body):
        middle = len(body) // 2
        pause = self.server.manners.get("seconds for each byte")
        if pause and len(body) > 1:
            for byte in body:
                self.wfile.write(bytes([byte]))
                time.sleep(pause)
            return
        self.wfile.write(body[:middle])
        if self.server.within:
            # As a server that reads a file which is written in place.
            other = self.server.within(self.server, body)
            self.wfile.write(other[middle:])
            return
        self.wfile.write(body[middle:])

    def log_message(self, format, *args):
        pass


@pytest.fixture
def web():
    """A web server: put content into `files` and ways of serving it into `manners`."""
    server = WebServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


class Chaos:
    """A proxy that lets so many bytes of each connection through, and then drops it."""

    def __init__(self, target: str, seed: int, least: int, most: int) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "", parts.port or 0)
        self._random, self._least, self._most = random.Random(seed), least, most
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.dropped = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            allowed = self._random.randint(self._least, self._most)
            server = socket.create_connection(self._target)
            threading.Thread(target=self._pass, args=(client, server, None), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, allowed), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, allowed: int | None) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(16384 if allowed is None else min(16384, allowed)):
                target.sendall(block)
                if allowed is not None:
                    allowed -= len(block)
                    if not allowed:
                        self.dropped += 1
                        break
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
