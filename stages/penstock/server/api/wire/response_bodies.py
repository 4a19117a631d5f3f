"""Results of futures as the bytes that clients are sent: protobuf, or JSON.

Only functions: small results are written in the event loop, and others in a process of their own.
"""

from typing import Literal

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from penstock.server.api.futures import ResultFormat
from penstock.server.api.wire.encode_results import encode, json_of_failure, json_of_result
from penstock.server.api.wire.protobuf import write_result
from penstock.server.protocol.envelopes import Failure
from penstock.server.protocol.results import Passed, Result, Sampled

Form = Literal["json", "protobuf"]

INLINE_BYTES = {"json": 1 << 17, "protobuf": 1 << 22}
"""Of the arrays of a result: those of more are not written in the event loop."""
INLINE_ARRAYS = 512
"""The same of samples."""
MAX_JSON_BYTES = 16 << 20
"""Of the arrays of a result in JSON, which takes six times as many."""
PIECE = 1 << 16
"""Bytes of an answer that are handed over at a time, as its client takes them."""

TOO_LARGE = Failure(
    id="",
    error=(
        f"the result has over {MAX_JSON_BYTES} bytes of numbers, which is too much for JSON; send"
        " fewer samples at once, or ask for application/x-protobuf"
    ),
    category="user",
    code="invalid",
)


class ResultJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How a result is to be written; it follows, in msgpack."""

    shape: ResultFormat
    form: Form


def is_small(result: Result, size: int, form: Form) -> bool:
    """Whether it is written within some milliseconds. `size`: bytes of its arrays."""
    parts = 0
    match result:
        case Passed(outputs=outputs):
            parts = len(outputs)
        case Sampled(sequences=sequences):
            parts = len(sequences)
        case _:
            pass
    return size <= INLINE_BYTES[form] and parts <= INLINE_ARRAYS


def negotiate_format(result: Result, accept: str) -> Form:
    """How a client that takes `accept` is told of it."""
    return "protobuf" if "protobuf" in accept and isinstance(result, Passed | Sampled) else "json"


def write(result: Result, shape: ResultFormat, form: Form, size: int) -> bytes:
    """The result as it is sent."""
    if form == "protobuf":
        message = write_result(result, shape)
        assert message is not None
        return message
    if size > MAX_JSON_BYTES:
        return encode(json_of_failure(TOO_LARGE))
    return encode(json_of_result(result, shape))


class PiecesResponse(Response):
    """An answer that is handed over piece by piece: no connection has a copy of its own."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        del scope, receive
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        body = memoryview(self.body)
        for at in range(0, max(1, len(body)), PIECE):
            piece = bytes(body[at : at + PIECE])
            is_last = at + PIECE >= len(body)
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
