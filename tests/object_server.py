"""What the servers of object stores on loopback have in common."""

import base64
import hashlib
import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class Object:
    """One version of an object. Its number is the generation, or the tag."""

    content: bytes
    number: int
    encoding: str = ""
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def md5(self) -> str:
        return base64.b64encode(hashlib.md5(self.content).digest()).decode()


class ObjectServer(http.server.ThreadingHTTPServer):
    """Objects by (bucket, name), of which each write makes another version."""

    def __init__(self, handler: type["ObjectHandler"]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.objects: dict[tuple[str, str], Object] = {}
        self.number = 1_700_000_000_000_000
        self.uploads: dict[str, Any] = {}
        self.lock = threading.Lock()
        self.manners: dict[str, Any] = {}
        self.reads: list[dict[str, str]] = []
        """The conditions of the reads of content."""
        self.before_read: Callable[[int], None] | None = None
        """Called with the number of the read of content that is answered next."""

    def write(self, bucket: str, name: str, content: bytes, **more: Any) -> Object:
        """Write an object, as anyone may who has the right to."""
        self.number += 1
        self.objects[bucket, name] = written = Object(content, self.number, **more)
        return written

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class ObjectHandler(http.server.BaseHTTPRequestHandler):
    """One request; a subclass has a method `answer`."""

    server: ObjectServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, True).items()}
        with self.server.lock:
            content = self._body()
            if status := self.server.manners.get("refuses"):
                self.refuse(status, "Refused")
                return
            self.answer(parts.path, query, content)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

    def answer(self, path: str, query: dict[str, str], content: bytes) -> None:
        raise NotImplementedError

    def refuse(self, status: int, code: str) -> None:
        raise NotImplementedError

    def send(self, status: int, body: bytes = b"", **headers: Any) -> None:
        """Send an answer; an underscore in a header's name is a hyphen."""
        self.send_response(status)
        if "Content_Length" not in headers:
            headers["Content_Length"] = len(body)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):
                self.wfile.write(body)

    def send_content(self, found: Object, version: Callable[[], dict[str, str]]) -> None:
        """Send the range of the object's content that is asked for, as `manners` says."""
        manners, size = self.server.manners, len(found.content)
        asked = self.headers.get("x-ms-range") or self.headers.get("Range")
        first, last = 0, size - 1
        if asked:
            start, _, stop = asked.removeprefix("bytes=").partition("-")
            first, last = int(start), min(int(stop or size), size - 1)
            if first >= size:
                self.refuse(416, "InvalidRange")
                return
        first += manners.get("shift", 0) if first else 0
        body = found.content[first : last + 1]
        headers: dict[str, Any] = {**version(), "Content_Length": len(body)}
        if asked:
            headers["Content_Range"] = f"bytes {first}-{last}/{size}"
        if found.encoding:
            headers["Content_Encoding"] = found.encoding
        if "cut to" in manners:
            body, self.close_connection = body[: manners["cut to"]], True
        self.send(206 if asked else 200, body, **headers)

    def note_read(self, condition: str | None) -> None:
        """Count a read of content, whose condition the client has sent."""
        self.server.reads.append({"condition": condition or ""})
        if self.server.before_read:
            self.server.before_read(len(self.server.reads))

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks: list[bytes] = []
        while length := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(length))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def names_below(
    server: ObjectServer, bucket: str, prefix: str, delimiter: str
) -> tuple[list[str], list[str]]:
    """Names of objects and of folders, as listings have them."""
    names = sorted(name for b, name in server.objects if b == bucket and name.startswith(prefix))
    if not delimiter:
        return names, []
    cut = {name: name[len(prefix) :].partition(delimiter) for name in names}
    folders = sorted({prefix + head + sep for head, sep, _ in cut.values() if sep})
    return [name for name, (_, sep, _) in cut.items() if not sep], folders


@contextmanager
def serving(handler: type[ObjectHandler]) -> Iterator[ObjectServer]:
    """A server on loopback."""
    server = ObjectServer(handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
