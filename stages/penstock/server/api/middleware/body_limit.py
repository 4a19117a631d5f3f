"""Request body limits: size, read timeout, and memory for decoding.

Bodies of most routes are small and are decoded here. Bodies with samples may be large and are
passed on undecoded (`request_bodies`).
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import zstandard
from fastapi import Request
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from penstock.server.api.errors import ApiError

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
MAX_SMALL_BYTES = 1 << 20  # Maximum bytes of a body without samples, compressed and decompressed
# Maximum commas, colons and brackets in a small JSON body: some milliseconds of decoding.
MAX_SMALL_VALUES = 20_000
# Maximum number of keys per object, except for loss inputs: each unknown key becomes a validation
# error, which takes more time and memory than the key.
MAX_KEYS = 64
SMALL_WINDOW = 1 << 23  # Maximum window size in bytes for decompressing a small body
# The first bytes of each body that are always accepted, so that heartbeats succeed when there is no
# memory for large bodies.
UNCOUNTED_BYTES = 1 << 16

BODY_SECONDS = 20.0  # Seconds for a body to arrive, plus its length divided by MIN_RATE
MIN_RATE = 64 << 10  # Minimum average upload rate in bytes per second


# Without `eq` it is hashed by identity: two bodies of an owner may have equal fields.
@dataclass(eq=False)
class BodyLease:
    """The memory of one body."""

    owner: str
    count: int = 0  # Bytes counted so far
    deadline: asyncio.Timeout | None = None  # The timeout while the body is being received
    is_evicted: bool = False


@dataclass
class BodyMemory:
    """The memory of all bodies, shared fairly between owners. At the limit, the owner with the most
    memory loses a body that is still being received."""

    max_bytes: int
    max_owner_bytes: int
    _by_owner: Counter[str] = field(default_factory=Counter[str])
    _held: dict[BodyLease, None] = field(default_factory=dict[BodyLease, None])

    @property
    def held_bytes(self) -> int:
        return self._by_owner.total()

    def take(self, held: BodyLease, count: int) -> None:
        """Count more bytes of a body. Raises ApiError (429) if there is no memory."""
        if self._by_owner[held.owner] + count > self.max_owner_bytes:
            raise _out_of_memory_error()
        while self.held_bytes + count > self.max_bytes:
            victim = self._to_evict(held.owner, count)
            if victim is None or victim.deadline is None:
                raise _out_of_memory_error()
            victim.is_evicted = True
            # A time in the past: the loop cancels its reader in the next iteration.
            victim.deadline.reschedule(0.0)
            self.release(victim)
        self._held[held] = None
        held.count += count
        self._by_owner[held.owner] += count

    def release(self, held: BodyLease) -> None:
        self._held.pop(held, None)
        self._by_owner[held.owner] -= held.count
        if not self._by_owner[held.owner]:
            del self._by_owner[held.owner]
        held.count = 0

    def _to_evict(self, owner: str, count: int) -> BodyLease | None:
        """The newest incomplete body of the owner with the most memory, if that is another owner
        who will still have at least as much as this one."""
        [(largest, most)] = self._by_owner.most_common(1) or [(owner, 0)]
        if largest == owner or most < self._by_owner[owner] + count:
            return None
        for held in reversed(self._held):
            if held.owner == largest and held.deadline and not held.deadline.expired():
                return held
        return None


class BoundedRequest(Request):
    """A request whose body is limited by `max_bytes`, by the total memory, and in time."""

    def __init__(
        self, scope: Scope, receive: Receive, max_bytes: int, body_memory: BodyMemory
    ) -> None:
        super().__init__(scope, receive)
        self.max_bytes = max_bytes
        """Maximum bytes of a body with samples, compressed and decompressed."""
        self._bodies = body_memory
        self._memory: BodyLease | None = None
        self._read: bytes | None = None
        self.parsed: Any = None  # The decoded body; set by routes with samples

    @property
    def kind(self) -> str:
        """The media type without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def encoding(self) -> str:
        """The content encoding: `zstd` or `identity`. Raises ApiError (415) for others."""
        encoding = self.headers.get("content-encoding", "identity").strip().lower() or "identity"
        if encoding not in ("identity", "zstd"):
            raise ApiError(
                f"a body packed as {encoding[:100]!r}: send it as it is, or as zstd", status=415
            )
        return encoding

    async def body(self) -> bytes:
        """Read a small body and decompress it. Raises ApiError: 408 for a timeout, 413 for a body
        that is too large, 415 for an unsupported content type or encoding, 429 if there is no
        memory for it, 400 for invalid compressed data."""
        if self._read is None:
            limit = min(self.max_bytes, MAX_SMALL_BYTES)
            packed = b"".join(await self.parts(limit))
            self._read = decompressed(packed, self.encoding, limit, SMALL_WINDOW)
        return self._read

    async def json(self) -> Any:
        """A small body as JSON. Raises ApiError as `body`, `parsed_json` and `require_few_keys`."""
        self.parsed = parsed_json(await self.body(), MAX_SMALL_VALUES, MAX_SMALL_VALUES)
        stack: list[Any] = [self.parsed]
        while stack:
            value = stack.pop()
            if isinstance(value, dict):
                mapping = cast("dict[str, Any]", value)
                require_few_keys(mapping)
                stack += mapping.values()
            elif isinstance(value, list):
                stack += cast("list[Any]", value)
        return self.parsed

    async def parts(self, limit: int) -> Sequence[bytes]:
        """The body as sent, of at most `limit` bytes, in chunks. Raises ApiError as `body`."""
        content_length = self.headers.get("content-length", "")
        # `int` raises for more than 4300 digits (Python 3.11).
        if content_length.isdecimal() and (len(content_length) > 18 or int(content_length) > limit):
            raise body_too_large(limit)
        parts: list[bytes] = []
        length = 0
        async with self._arriving() as (memory, deadline):
            began = asyncio.get_running_loop().time()
            async for part in self.stream():
                length += len(part)
                if memory.is_evicted:
                    raise _out_of_memory_error()
                if length > limit:
                    raise body_too_large(limit)
                # Of this part, what lies beyond the first UNCOUNTED_BYTES of the body.
                counted = length - max(length - len(part), UNCOUNTED_BYTES)
                if counted > 0:
                    self._bodies.take(memory, counted)
                parts.append(part)
                deadline.reschedule(began + BODY_SECONDS + length / MIN_RATE)
        if length and self.kind not in (JSON, PROTOBUF):
            raise ApiError(
                f"a body of type {self.kind[:100] or 'unsaid'!r}: send {JSON}", status=415
            )
        return parts

    def release(self) -> None:
        if self._memory is not None:
            self._bodies.release(self._memory)
            self._memory = None

    @asynccontextmanager
    async def _arriving(self) -> AsyncGenerator[tuple[BodyLease, asyncio.Timeout]]:
        memory = self._memory = BodyLease(getattr(self.state, "owner", ""))
        try:
            async with asyncio.timeout(BODY_SECONDS) as deadline:
                memory.deadline = deadline
                yield memory, deadline
        except TimeoutError:
            if memory.is_evicted:
                raise _out_of_memory_error() from None
            raise ApiError(
                f"the body did not arrive in {BODY_SECONDS:g} s and at {MIN_RATE} bytes/s;"
                " send it again",
                status=408,
            ) from None
        except ClientDisconnect:
            raise ApiError("the client closed the connection within the body") from None
        finally:
            memory.deadline = None


def decompressed(packed: bytes, encoding: str, limit: int, window: int) -> bytes:
    """Decompress a body to at most `limit` bytes, with a window of at most `window` bytes. Raises
    ApiError: 413 for a body that is too large, 400 for invalid zstd data."""
    if encoding == "identity":
        return packed
    try:
        # The header of a frame names its window, for which memory is allocated before any data.
        unpacker = zstandard.ZstdDecompressor(max_window_size=window)
        # By default the reader ends after the first frame, and the rest would be ignored.
        with unpacker.stream_reader(packed, read_across_frames=True) as reader:
            body = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise ApiError(f"the body is no zstd: {error}") from error
    if len(body) > limit:
        raise body_too_large(limit)
    return body


def parsed_json(body: bytes, max_values: int, max_containers: int) -> Any:
    """Parse strict JSON: no NaN, no lone surrogates, no unlimited nesting.

    Commas, colons and brackets are counted before decoding, including those within strings, because
    decoded objects may take a hundred times the memory of the text. Raises ApiError: 413 above
    these limits, 400 for invalid JSON.
    """
    containers = body.count(b"[") + body.count(b"{")
    values = body.count(b",") + body.count(b":") + containers
    if containers > max_containers or values > max_values:
        raise ApiError(
            f"the body has {values} commas, colons and brackets, {containers} of which open arrays"
            f" or objects; {max_values} and {max_containers} may be. Send less at once",
            status=413,
        )
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is no JSON: {error}") from error


def require_few_keys(mapping: Mapping[str, Any]) -> None:
    """Raise ApiError for a JSON object with more than MAX_KEYS keys."""
    if len(mapping) > MAX_KEYS:
        raise ApiError(f"an object of the body has {len(mapping)} keys; {MAX_KEYS} may be")


def body_too_large(limit: int) -> ApiError:
    """The error for a body of more than `limit` bytes."""
    return ApiError(f"the body is over {limit} bytes; send fewer samples at once", status=413)


def _out_of_memory_error() -> ApiError:
    return ApiError("the server holds as many large bodies as it may; come again", code="busy")
