"""Request context of a route: owner, scheduler client, futures."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from penstock.server.api.connections import Connections
from penstock.server.api.errors import ApiError
from penstock.server.api.futures import (
    EncodedRequest,
    Futures,
    RequestKind,
    ResultFormat,
    new_future,
)
from penstock.server.api.metrics import Metrics
from penstock.server.api.middleware.auth import ApiKeys
from penstock.server.api.middleware.body_limit import BodyMemory, BoundedRequest
from penstock.server.api.middleware.concurrency_limit import ConcurrencyLimit
from penstock.server.api.middleware.rate_limit import RateLimit
from penstock.server.api.scheduler_client import SchedulerClient
from penstock.server.api.schemas.responses import FutureResponse
from penstock.server.api.session_heartbeats import SessionHeartbeats
from penstock.server.api.settings import ApiSettings
from penstock.server.api.wire.codec_pool import CodecPool
from penstock.server.api.wire.request_bodies import (
    INLINE_BYTES,
    BodyDecoder,
    BodyJob,
    DecodedBody,
    NotInlineError,
    SampleCall,
    to_decode_error,
)
from penstock.server.protocol.codec import Encoded
from penstock.server.protocol.requests import ForwardBackward, ModelOperation, Operation, Sample
from penstock.server.protocol.results import Result
from penstock.server.protocol.types import Quantization

R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class AppState:
    """Shared state of the API process."""

    settings: ApiSettings
    scheduler: SchedulerClient
    futures: Futures
    heartbeats: SessionHeartbeats
    concurrency: ConcurrencyLimit
    keys: ApiKeys
    rate_limit: RateLimit
    metrics: Metrics
    body_memory: BodyMemory
    codec_pool: CodecPool
    connections: Connections
    quantization: dict[str, Quantization | None]
    """Default weight-sync quantization by owner, for sync requests that set none."""
    shutting_down: asyncio.Event = field(default_factory=asyncio.Event)
    """Set on shutdown, so that polls return."""


@dataclass(frozen=True)
class RequestContext:
    """One request."""

    service: AppState
    owner: str
    idempotency: str  # The client's idempotency key, the same for a repeated request; or empty

    async def call(self, operation: Operation, kind: type[R], *, by_workers: bool = False) -> R:
        """Wait for a request to the scheduler and return its result, of this type. Raises ApiError:
        the scheduler's error, or 504 on timeout."""
        settings = self.service.settings
        seconds = settings.operation_timeout if by_workers else settings.answer_timeout
        result = await self.service.scheduler.call(self.owner, operation, seconds)
        if not isinstance(result, kind):
            raise ApiError(
                f"the scheduler returned {type(result).__name__}, not {kind.__name__}",
                code="internal",
            )
        return result

    @asynccontextmanager
    async def decoding(
        self, request: Request, call: SampleCall
    ) -> AsyncGenerator[tuple[DecodedBody, ForwardBackward | Sample | EncodedRequest]]:
        """Decode a body with samples to its request. That of a large body is already encoded, and
        must be submitted inside the block. Raises ApiError and RequestValidationError;
        `request.parsed` then has the model and sequence number."""
        assert isinstance(request, BoundedRequest)
        name = new_future()
        job = BodyJob(
            call=call,
            kind=request.kind,
            encoding=request.encoding,
            max_bytes=request.max_bytes,
            takes_images=bool(self.service.settings.image_processor),
            request_id=name,
            owner=self.owner,
        )
        parts = await request.parts(request.max_bytes)
        if (small := self._decoded(request, job, parts)) is not None:
            yield small
            return
        async with self.service.codec_pool.decoding(self.owner, job, parts) as (reply, frame):
            # The codec process has a copy: free this one, and the memory that is counted for it.
            parts = ()
            request.release()
            if reply.error is not None:
                request.parsed = reply.error.model_and_seq
                raise to_decode_error(reply.error)
            assert reply.decoded is not None
            yield reply.decoded, EncodedRequest(name, Encoded(frame))

    def _decoded(
        self, request: BoundedRequest, job: BodyJob, parts: Sequence[bytes]
    ) -> tuple[DecodedBody, ForwardBackward | Sample] | None:
        """The same for a small body; None for a large one."""
        if sum(map(len, parts)) > INLINE_BYTES:
            return None
        body = BodyDecoder(job, is_inline=True)
        try:
            return body.decode(b"".join(parts))
        except NotInlineError:
            return None
        except Exception:
            request.parsed = body.model_and_seq
            raise

    async def submit(
        self,
        kind: RequestKind,
        operation: ModelOperation | Sample | EncodedRequest,
        *,
        model: str | None = None,
        seq: int | None = None,
        retry_key: str = "",
        **result_format: Any,
    ) -> FutureResponse:
        """Submit a request to the scheduler and return its future. `model`: for an encoded request.
        `retry_key` is the idempotency key if the client's names identify a repeated request;
        `result_format` are further fields of ResultFormat."""
        model = model or getattr(operation, "model", None)
        future = await self.service.futures.submit(
            self.owner,
            operation,
            ResultFormat(kind, model, **result_format),
            seq=seq,
            idempotency=retry_key or self.idempotency,
        )
        return FutureResponse(request_id=future.id, model_id=model)


async def get_context(request: Request) -> RequestContext:
    """Of an authenticated request. Async, because FastAPI calls sync dependencies in a thread."""
    return RequestContext(
        request.app.state.service,
        request.state.owner,
        # A client chooses it, and it is kept as long as the future.
        request.headers.get("x-idempotency-key", "")[:200],
    )


Context = Annotated[RequestContext, Depends(get_context)]
