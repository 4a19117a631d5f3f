"""Drawn lies of a web server: the file is read as it is, or refused by name, within bounds."""

import gzip
import http.server
import random
import re
import resource
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from itertools import chain

import pytest

from penstock.core.errors import PenstockError
from penstock.core.process import retry
from penstock.core.remote import answers, web
from penstock.core.remote.open import open_file
from penstock.core.sources.pin import pin_data
from penstock.media.decode import BadImage
from penstock.media.originals import Originals
from penstock.media.reference import ImageRef, read_image

SIZE = 700_001
CONTENT, OTHER = (random.Random(seed).randbytes(SIZE) for seed in range(2))
BLOCK = bytes(1 << 16)
SECONDS = 20
"""Of a case, within which also an endless answer has to be given up."""


def unending(block=BLOCK):
    """Blocks for as long as the connection and the case last."""
    ends = time.monotonic() + SECONDS + 5
    while time.monotonic() < ends:
        yield block


def chunk(content, size=None, extension=b""):
    return b"%s%s\r\n%s\r\n" % (size or b"%x" % len(content), extension, content)


class Answer:
    """An honest answer to a request for the file, which a lie changes before it is sent."""

    def __init__(self, asked):
        self.status = "200 OK" if asked is None else "206 Partial Content"
        self.start, self.stop = asked or (0, SIZE)
        self.stop = min(self.stop, SIZE)
        self.body = CONTENT[self.start : self.stop]
        self.headers = {"ETag": '"1"', "Content-Length": str(len(self.body))}
        if asked is not None:
            self.headers["Content-Range"] = f"bytes {self.start}-{self.stop - 1}/{SIZE}"
        self.raw: Iterable[bytes] | None = None
        """Blocks to send in place of all of it."""

    def blocks(self):
        if self.raw is not None:
            yield from self.raw
            return
        lines = [f"HTTP/1.1 {self.status}", *(f"{n}: {v}" for n, v in self.headers.items())]
        yield "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1", "replace")
        yield from self.body if not isinstance(self.body, bytes) else [self.body]

    def chunked(self, blocks):
        del self.headers["Content-Length"]
        self.headers["Transfer-Encoding"] = "chunked"
        self.body = blocks


NUMBERS = ["0", "1", "-1", "+7", "7e3", "x", "", "9" * 19, "9" * 5000, str(1 << 64), "٣"]


def length(answer, draw):
    size = len(answer.body)
    answer.headers["Content-Length"] = draw.choice([*NUMBERS, str(size + 1), str(size // 2)])


def lengths(answer, draw):
    answer.headers["Content-length"] = draw.choice([*NUMBERS, str(len(answer.body))])


def content_range(answer, draw):
    first, last, total = answer.start, answer.stop - 1, SIZE
    number = draw.choice(NUMBERS)
    answer.headers["Content-Range"] = draw.choice(
        [
            f"bytes {first + 1}-{last + 1}/{total}",
            f"bytes {first}-{last + 1}/{total}",
            f"bytes {last}-{first}/{total}",
            f"bytes {first}-{last}/{total + 1}",
            f"bytes {first}-{last}/{number}",
            f"bytes {number}-{last}/{total}",
            f"bytes {first}-{number}/{total}",
            f"bytes {first}-{last}/*",
            f"bytes */{number}",
            f"bits {first}-{last}/{total}",
            number,
        ]
    )


def no_content_range(answer, _):
    answer.headers.pop("Content-Range", None)


def other_body(answer, draw):
    """With the range and the version of the file that it was."""
    answer.headers["ETag"] = draw.choice(
        ['"2"', 'W/"1"', "1", "", '"' + "x" * 60_000 + '"', '"\x01"']
    )
    answer.body = OTHER[answer.start : answer.stop]


def no_tag(answer, _):
    del answer.headers["ETag"]
    answer.body = OTHER[answer.start : answer.stop]


def dates(answer, draw):
    values = ["", "x", "Mon, 01 Jan 99999 00:00:00 GMT", "Mon, 01 Jan 2024 00:00:00 -99999999"]
    values += ["Mon, 01 Jan 2024 00:00:00 GMT", "0", "Fri, 31 Dec 9999 23:59:59 -2359", "9" * 5000]
    answer.headers |= {name: draw.choice(values) for name in ("Last-Modified", "Date")}


STATUSES = ["200", "200 OK", "201 x", "203 x", "204 x", "206 x", "207 x", "226 x", "300 x"]
STATUSES += ["304 x", "400 x", "401 x", "403 x", "404 x", "405 x", "410 x", "412 x", "416 x"]
STATUSES += ["429 x", "451 x", "500 x", "501 x", "503 x", "599 x", "600 x", "999 x", "99", "0"]
STATUSES += ["-1 x", "abc", "200 \x1b[31m" + "x" * 500, "101 x", "٢٠٠ OK"]


def status(answer, draw):
    answer.status = draw.choice(STATUSES)
    after = [str(1 << 70), "nan", "-1", "9" * 400, "Fri, 31 Dec 9999 23:59:59 -99999999", "٣"]
    answer.headers["Retry-After"] = draw.choice(after)


def whole_for_a_range(answer, _):
    answer.status, answer.body = "200 OK", CONTENT
    answer.headers |= {"Content-Length": str(SIZE)}
    answer.headers.pop("Content-Range", None)


def encoding(answer, draw):
    names = ["gzip", "deflate", "br", "zstd", "compress", "x", "gzip, gzip", "GZIP", "", "identity"]
    answer.headers["Content-Encoding"] = draw.choice(names)
    answer.body = draw.choice([answer.body, compressed(answer.body), compressed(OTHER)])
    answer.headers["Content-Length"] = str(len(answer.body))


def compressed(content):
    return gzip.compress(content, mtime=0)


def encoded_bomb(answer, draw):
    answer.body = bomb() * draw.choice([1, 40])
    answer.headers |= {"Content-Encoding": "gzip", "Content-Length": str(len(answer.body))}


@cache
def bomb():
    return gzip.compress(bytes(64 << 20))


def endless(answer, _):
    answer.chunked(chunk(block) for block in unending())


def endless_to_the_close(answer, _):
    del answer.headers["Content-Length"]
    answer.body = unending()


def more_than_the_range(answer, draw):
    if "Content-Range" not in answer.headers:
        return  # the file would be longer
    answer.chunked([chunk(answer.body), chunk(draw.randbytes(draw.choice([1, 5000]))), chunk(b"")])


def chunks(answer, draw):
    body, half = answer.body, answer.body
    if "Content-Range" in answer.headers:  # without it, the file would be shorter
        half = body[: len(body) // 2]
    answer.chunked(
        draw.choice(
            [
                [chunk(body)],
                [chunk(half), chunk(b"")],
                [chunk(body, b"%x" % (len(body) + 9)), chunk(b"")],
                [chunk(body, b"%x" % (len(body) // 2)), chunk(b"")],
                [chunk(body, b"f" * 17), chunk(b"")],
                [chunk(body, b"-1"), chunk(b"")],
                [chunk(body, b"0x10"), chunk(b"")],
                [chunk(body, b"g"), chunk(b"")],
                [chunk(body, extension=b";" + b"x" * (4 << 20)), chunk(b"")],
                [chunk(body), b"0\r\n" + b"A: " + b"x" * (4 << 20) + b"\r\n\r\n"],
                [chunk(bytes([byte])) for byte in body[:9000]]
                + [chunk(body[9000:])] * (len(body) > 9000)
                + [chunk(b"")],
            ]
        )
    )


def redirect(answer, draw):
    port = draw.choice([1, 9, 65_535])
    targets = ["/a.txt", "/b.txt", "", "#x", "?y", "file:///etc/hostname", "ftp://127.0.0.1/a.txt"]
    targets += ["http://[::1", "http://", "http:///x", "//", "http://a b/", f"http://[::1]:{port}/"]
    targets += ["http://127.0.0.1:99999/", "http://0x7f.1/", "data:text/plain,x", "javascript:x"]
    targets += ["\x00", "http://user:secret@127.0.0.1:9/a.txt", "http://" + "a" * 300 + ".invalid/"]
    targets += ["/" + "x" * 6000, "http://\udcff/", "http://xn--a/", "http://169.254.169.254:1/"]
    answer.status = draw.choice(["301 x", "302 x", "303 x", "307 x", "308 x"])
    answer.headers["Location"] = draw.choice(targets)


def huge_headers(answer, draw):
    many = (b"X-%d: %s\r\n" % (n, b"x" * 90) for n in range(60_000))
    answer.raw = draw.choice(
        [
            [b"HTTP/1.1 200 OK\r\nX: ", *[b"x" * 65_536] * 64, b"\r\n\r\n"],
            [b"HTTP/1.1 200 OK\r\n", *many, b"\r\n"],
            [b"HTTP/1.1 200 ", *[b"x" * 65_536] * 64, b"\r\n\r\n"],
            (b"X: x\r\n" if n else b"HTTP/1.1 200 OK\r\n" for n, _ in enumerate(unending())),
            (b"HTTP/1.1 100 Continue\r\n\r\n" for _ in unending()),
        ]
    )


def no_http(answer, draw):
    half = b"".join(answer.blocks())
    answer.raw = draw.choice(
        [
            [],
            [half[: draw.randrange(len(half))]],
            [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"],
            [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
            [CONTENT],
            [b"HTTP/0.9 200\r\n\r\n", CONTENT],
            [b"HTTP/1.1 200 OK\nContent-Length: 3\n\nabc"],
            [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"],
            [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc"],
            [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, x\r\n\r\nabc"],
            [b"HTTP/1.1 200 OK\r\n X: folded\r\n\r\nabc"],
            [b"HTTP/1.1 200 OK\r\nX\0: y\r\n\r\nabc"],
        ]
    )


def silence(answer, draw):
    sent = b"".join(answer.blocks())[: draw.choice([0, 40, 400])]
    answer.raw = chain([sent], (b"" for block in unending() if not time.sleep(0.02)))


LIES = [length, lengths, content_range, no_content_range, other_body, no_tag, dates, status]
LIES += [whole_for_a_range, encoding, encoded_bomb, endless, endless_to_the_close]
LIES += [more_than_the_range, chunks, redirect, huge_headers, no_http, silence]

UNENDING = endless, endless_to_the_close, encoded_bomb


class Liar(http.server.ThreadingHTTPServer):
    """Answers with `lie` from its request `since` on, or to that one alone."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Lying)
        self.url = f"http://127.0.0.1:{self.server_port}/a.txt"

    def tell(self, lie, draw):
        self.lie, self.draw, self.count = lie, draw, 0
        self.since, self.is_once = draw.choice([1, 2, 3, 4]), draw.random() < 0.3
        self.has_ranges = draw.random() < 0.7

    def answer(self, headers):
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range", ""))
        if not self.has_ranges:
            asked = None
        answer = Answer(asked and (int(asked[1]), int(asked[2]) + 1))
        self.count += 1
        if self.count == self.since or (self.count > self.since and not self.is_once):
            self.lie(answer, self.draw)
        return answer


class Lying(http.server.BaseHTTPRequestHandler):
    server: Liar  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self):
        self.close_connection = True
        with suppress(OSError):
            for block in self.server.answer(self.headers).blocks():
                self.wfile.write(block)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def liar():
    server = Liar()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def as_data(server, _):
    source = pin_data(server.url, ds_type="text")
    location = source.paths[0] if source.paths else source.urls[0]
    with open_file(location, source.pin["files"][0]) as stream:
        return stream.read()


def as_image(server, folder):
    try:
        return read_image(ImageRef(server.url), None, Originals(folder), allow_private=True)
    except BadImage as error:
        raise PenstockError(str(error)) from error


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [len(LIES), pytest.param(760, marks=pytest.mark.exhaustive)])
def test_whatever_a_server_answers_the_file_is_read_as_it_is_or_refused_by_name(
    liar, tmp_path, monkeypatch, count
):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for module, name, seconds in (
        (retry, "FIRST_PAUSE", 0.001),
        (retry, "LONGEST_PAUSE", 0.01),
        (retry, "LONGEST_ASKED", 0.05),
        (web, "RESPONSE_SECONDS", 0.3),
        (answers, "PROGRESS_SECONDS", 0.3),
    ):
        monkeypatch.setattr(module, name, seconds)
    versions = [CONTENT, OTHER, *map(compressed, (CONTENT, OTHER)), gzip.decompress(bomb())]
    seed = random.randrange(1 << 32)
    print("seed", seed)
    outcomes, faults = Counter(), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        lie, draw = LIES[number % len(LIES)], random.Random(f"{seed} {number}")
        liar.tell(lie, draw)
        read = draw.choice([as_data, as_image])
        if lie in UNENDING and not (liar.has_ranges and liar.since > 1):
            read = as_image  # a user's own URL may be as long as the disk
        began = time.monotonic()
        try:
            content = read(liar, tmp_path / str(number))
            outcome = "read" if content in versions else "wrong"
            detail = f"{len(content)} bytes"
        except PenstockError as error:
            detail = str(error)
            outcome = "refused" if "a.txt" in detail and len(detail) < 1000 else "unnamed"
        except Exception as error:  # noqa: BLE001
            outcome, detail = "raised", repr(error)
        seconds = time.monotonic() - began
        outcomes[lie.__name__, outcome] += 1
        if outcome not in ("read", "refused") or seconds > SECONDS:
            faults.append((number, lie.__name__, read.__name__, outcome, seconds, detail[:300]))
    print("\n".join(f"{lie}: {outcome} {n}" for (lie, outcome), n in sorted(outcomes.items())))
    assert not faults, (seed, len(faults), faults[:9])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, seed
