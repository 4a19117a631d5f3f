"""What a route is served with: whose request it is, the engine, and the futures."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from penstock.server.api.connections import Connections
from penstock.server.api.errors import ApiError
from penstock.server.api.futures import EncodedAsk, Futures, Kind, ResultFormat, new_future
from penstock.server.api.metrics import Metrics
from penstock.server.api.middleware.auth import Keys
from penstock.server.api.middleware.body_limit import Bodies, BoundedRequest
from penstock.server.api.middleware.concurrency_limit import ConcurrencyLimit
from penstock.server.api.middleware.rate_limit import Rates
from penstock.server.api.scheduler_client import SchedulerClient
from penstock.server.api.session_heartbeats import SessionHeartbeats
from penstock.server.api.settings import ApiSettings
from penstock.server.api.wire.codec_pool import CodecPool
from penstock.server.api.wire.request_bodies import (
    INLINE_BYTES,
    BodyJob,
    Call,
    Decoded,
    NotInlineError,
    SampleBody,
    to_decode_error,
)
from penstock.server.protocol.codec import Encoded
from penstock.server.protocol.requests import Ordered, Pass, Sample, Work
from penstock.server.protocol.results import Result
from penstock.server.protocol.types import Quantization

R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class AppState:
    """What all requests of one API process share."""

    settings: ApiSettings
    link: SchedulerClient
    futures: Futures
    pulse: SessionHeartbeats
    turns: ConcurrencyLimit
    keys: Keys
    rates: Rates
    metrics: Metrics
    bodies: Bodies
    codecs: CodecPool
    connections: Connections
    quantization: dict[str, Quantization | None]
    """How weights are sent, by owner, where a request to send them does not say."""
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process is about to end, so that nobody waits longer."""


@dataclass(frozen=True)
class RequestContext:
    """One request."""

    service: AppState
    owner: str
    idempotency: str
    """The client's name for this request, the same when it sends it again; or empty."""

    async def call(self, work: Work, kind: type[R], *, by_workers: bool = False) -> R:
        """The result of a work that is waited for, which is of this kind.

        Raises Refusal: the engine's, or 504 where it takes too long.
        """
        settings = self.service.settings
        seconds = settings.operation_timeout if by_workers else settings.answer_timeout
        result = await self.service.link.call(self.owner, work, seconds)
        if not isinstance(result, kind):
            raise ApiError(
                f"the engine answered with {type(result).__name__}, not {kind.__name__}",
                code="internal",
                category="server",
            )
        return result

    @asynccontextmanager
    async def decoding(
        self, request: Request, call: Call
    ) -> AsyncGenerator[tuple[Decoded, Pass | Sample | EncodedAsk]]:
        """A body with samples, and its work; that of a large body is encoded already, and is to be
        submitted within.

        Raises Refusal and RequestValidationError. The request knows of whose work they are then.
        """
        assert isinstance(request, BoundedRequest)
        name = new_future()
        job = BodyJob(
            call=call,
            kind=request.kind,
            encoding=request.encoding,
            max_bytes=request.max_bytes,
            ask=name,
            owner=self.owner,
        )
        parts = await request.parts(request.max_bytes)
        if (small := self._decoded(request, job, parts)) is not None:
            yield small
            return
        async with self.service.codecs.decoding(self.owner, job, parts) as (reply, frame):
            parts = ()
            request.release()
            if reply.refused is not None:
                request.parsed = reply.refused.known
                raise to_decode_error(reply.refused)
            assert reply.decoded is not None
            yield reply.decoded, EncodedAsk(name, Encoded(frame))

    def _decoded(
        self, request: BoundedRequest, job: BodyJob, parts: Sequence[bytes]
    ) -> tuple[Decoded, Pass | Sample] | None:
        """The same of a small body; None for a large one."""
        if sum(map(len, parts)) > INLINE_BYTES:
            return None
        body = SampleBody(job, is_inline=True)
        try:
            return body.decode(b"".join(parts))
        except NotInlineError:
            return None
        except Exception:
            request.parsed = body.known
            raise

    async def submit(
        self,
        kind: Kind,
        work: Ordered | Sample | EncodedAsk,
        *,
        model: str | None = None,
        seq: int | None = None,
        again: str = "",
        **shape: Any,
    ) -> dict[str, Any]:
        """Hand a work over; what its client comes back with. `model`: of a work that is encoded.

        `again` names the work where the client's own names make it the same one when it is sent
        twice; `shape` are further fields of Shape.
        """
        model = model or getattr(work, "model", None)
        promise = await self.service.futures.submit(
            self.owner,
            work,
            ResultFormat(kind, model, **shape),
            seq=seq,
            idempotency=again or self.idempotency,
        )
        return {"request_id": promise.id, "model_id": model}


async def get_context(request: Request) -> RequestContext:
    """The desk of a request that was let in. Async, for others are called in another thread."""
    return RequestContext(
        request.app.state.service,
        request.state.owner,
        request.headers.get("x-idempotency-key", "")[:200],
    )


AtDesk = Annotated[RequestContext, Depends(get_context)]
