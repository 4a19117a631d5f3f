"""Encode results of futures as protobuf or JSON bytes.

Pure functions. Small results are encoded in the event loop, others in a codec process.
"""

from typing import Literal

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from penstock.server.api.futures import ResultFormat
from penstock.server.api.wire.encode_results import encode, json_of_failure, json_of_result
from penstock.server.api.wire.protobuf import write_result
from penstock.server.protocol.envelopes import Failure
from penstock.server.protocol.results import ForwardBackwardResult, Result, SampleResult

ResultEncoding = Literal["json", "protobuf"]

INLINE_BYTES = {"json": 1 << 17, "protobuf": 1 << 22}
"""Maximum array bytes of a result for encoding in the event loop."""
INLINE_ARRAYS = 512
"""Maximum number of samples for encoding in the event loop."""
MAX_JSON_BYTES = 16 << 20
"""Maximum array bytes of a JSON result; JSON takes six times as many."""
CHUNK_BYTES = 1 << 16
"""Chunk size of a response in bytes, sent as the client reads."""

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
    """How to encode a result, which follows in msgpack."""

    result_format: ResultFormat
    encoding: ResultEncoding


def is_small(result: Result, size: int, encoding: ResultEncoding) -> bool:
    """Whether encoding takes at most some milliseconds. `size`: bytes of its arrays."""
    parts = 0
    match result:
        case ForwardBackwardResult(outputs=outputs):
            parts = len(outputs)
        case SampleResult(sequences=sequences):
            parts = len(sequences)
        case _:
            pass
    return size <= INLINE_BYTES[encoding] and parts <= INLINE_ARRAYS


def negotiate_format(result: Result, accept: str) -> ResultEncoding:
    """The format for a client's Accept header."""
    return (
        "protobuf"
        if "protobuf" in accept and isinstance(result, ForwardBackwardResult | SampleResult)
        else "json"
    )


def write(
    result: Result, result_format: ResultFormat, encoding: ResultEncoding, size: int
) -> bytes:
    """Encode the result."""
    if encoding == "protobuf":
        message = write_result(result, result_format)
        assert message is not None
        return message
    if size > MAX_JSON_BYTES:
        return encode(json_of_failure(TOO_LARGE))
    return encode(json_of_result(result, result_format))


class ChunkedResponse(Response):
    """A response sent in chunks, so that no connection buffers a copy."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        del scope, receive
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        body = memoryview(self.body)
        for start in range(0, max(1, len(body)), CHUNK_BYTES):
            piece = bytes(body[start : start + CHUNK_BYTES])
            is_last = start + CHUNK_BYTES >= len(body)
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
