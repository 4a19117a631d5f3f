"""Bodies of requests: read within a bound, unpacked within it, and parsed strictly."""

from typing import Any

import zstandard
from fastapi import Request
from pydantic_core import from_json
from starlette.types import Receive, Scope

from penstock.server.api.refusals import Refusal

JSON = "application/json"
PROTOBUF = "application/x-protobuf"

WINDOW = 1 << 27
"""The most memory, in bytes, that unpacking may take for its window."""


class Reading:
    """Bytes of bodies that are held for requests that are served now."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes

    def take(self, count: int) -> None:
        """Hold so many more, or give back where negative. Raises Refusal (429)."""
        if count > self._left:
            raise Refusal(
                "the server holds as many large bodies as it may; come again",
                code="busy",
                retry_after=1.0,
            )
        self._left -= count


class BoundedRequest(Request):
    """A request whose body is at most `max_bytes`, packed and unpacked, and counts as `reading`."""

    def __init__(self, scope: Scope, receive: Receive, max_bytes: int, reading: Reading) -> None:
        super().__init__(scope, receive)
        self._max_bytes, self._reading, self._held = max_bytes, reading, 0
        self._read: bytes | None = None
        self.parsed: Any = None
        """What the body says, once it has been parsed; routes that read protobuf set it."""

    @property
    def kind(self) -> str:
        """Of what the body is, parameters apart."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def body(self) -> bytes:
        """The body, unpacked.

        Raises Refusal: 413 for one that is too long, 415 for one that is packed or written in
        another way than is read here, 400 for one that cannot be unpacked.
        """
        if self._read is None:
            packed = await self._packed()
            if packed and self.kind not in (JSON, PROTOBUF):
                raise Refusal(
                    f"a body of type {self.kind[:100] or 'unsaid'!r}: send {JSON}", status=415
                )
            self._read = self._unpacked(packed)
            self._hold(len(self._read) - len(packed))
        return self._read

    def release(self) -> None:
        """The request is served: its body is held no more."""
        self._hold(-self._held)

    def _hold(self, count: int) -> None:
        self._reading.take(count)
        self._held += count

    async def json(self) -> Any:
        """The body as JSON says it: no NaN, no half of a surrogate pair, no bottomless nesting."""
        try:
            self.parsed = from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise Refusal(f"the body is no JSON: {error}") from error
        return self.parsed

    async def _packed(self) -> bytes:
        said = self.headers.get("content-length", "")
        if said.isdecimal() and int(said) > self._max_bytes:
            raise self._too_long()
        parts: list[bytes] = []
        length = 0
        async for part in self.stream():
            length += len(part)
            if length > self._max_bytes:
                raise self._too_long()
            self._hold(len(part))
            parts.append(part)
        return b"".join(parts)

    def _unpacked(self, packed: bytes) -> bytes:
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("identity", ""):
            return packed
        if encoding != "zstd":
            raise Refusal(
                f"a body packed as {encoding[:100]!r}: send it as it is, or as zstd", status=415
            )
        unpacker = zstandard.ZstdDecompressor(max_window_size=WINDOW)
        try:
            with unpacker.stream_reader(packed, read_across_frames=True) as reader:
                body = reader.read(self._max_bytes + 1)
        except zstandard.ZstdError as error:
            raise Refusal(f"the body is no zstd: {error}") from error
        if len(body) > self._max_bytes:
            raise self._too_long()
        return body

    def _too_long(self) -> Refusal:
        return Refusal(
            f"the body is over {self._max_bytes} bytes; send fewer samples at once", status=413
        )
