"""FastAPI application of the training server. No torch and no training code."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from penstock.server.api.connections import Connections
from penstock.server.api.context import AppState
from penstock.server.api.errors import (
    ApiError,
    answer_crash,
    answer_faults,
    answer_http,
    answer_refusal,
)
from penstock.server.api.futures import Futures
from penstock.server.api.metrics import Metrics
from penstock.server.api.middleware.auth import Keys
from penstock.server.api.middleware.body_limit import Bodies
from penstock.server.api.middleware.concurrency_limit import (
    ConcurrencyLimit,
    ConcurrencyLimitMiddleware,
)
from penstock.server.api.middleware.rate_limit import Rates
from penstock.server.api.openapi import document
from penstock.server.api.routes import checkpoints, sampling, training, unsupported, weight_sync
from penstock.server.api.routes import futures as routes_futures
from penstock.server.api.routes import service as routes_service
from penstock.server.api.scheduler_client import SchedulerClient
from penstock.server.api.session_heartbeats import SessionHeartbeats
from penstock.server.api.settings import ApiSettings
from penstock.server.api.wire.codec_pool import CodecPool
from penstock.server.protocol.codec import Channel, Encoded
from penstock.server.protocol.envelopes import FromEngine, ToEngine

SHARED_BYTES = 128 << 20
"""Bytes of concurrent request bodies in addition to one body of maximum size, so that one owner
cannot block the others."""


def create_app(channel: Channel[ToEngine | Encoded, FromEngine], settings: ApiSettings) -> FastAPI:
    """Create the application; it uses `channel` between startup and shutdown."""
    link = SchedulerClient(channel)
    futures = Futures(
        link,
        ttl=settings.future_ttl,
        max_pending=settings.max_pending_requests,
        max_kept_bytes=settings.max_kept_bytes,
    )
    pulse = SessionHeartbeats(
        link,
        idle_timeout=settings.idle_session_timeout,
        answer_timeout=settings.answer_timeout,
    )
    turns = ConcurrencyLimit()
    service = AppState(
        settings=settings,
        link=link,
        futures=futures,
        pulse=pulse,
        turns=turns,
        keys=Keys(settings.keys),
        rates=Rates(settings.requests_per_minute),
        metrics=Metrics(),
        bodies=Bodies(settings.max_request_bytes + SHARED_BYTES, settings.max_request_bytes),
        codecs=CodecPool(settings.max_request_bytes),
        connections=Connections(settings.max_connections),
        quantization={},
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        link.start()
        futures.start()
        pulse.start()
        service.connections.start()
        yield
        await service.connections.stop()
        await service.codecs.stop()
        await pulse.stop()
        await futures.stop()
        await link.stop()

    # The Swagger and ReDoc pages are disabled: they load scripts from a CDN.
    app = FastAPI(
        title="Penstock training server", lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.service = service
    app.add_exception_handler(ApiError, answer_refusal)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(RequestValidationError, answer_faults)
    app.add_exception_handler(Exception, answer_crash)
    # Routes are matched in this order: the most frequent ones first.
    for router in (
        routes_futures.router,
        routes_service.router,
        training.router,
        sampling.router,
        checkpoints.router,
        weight_sync.router,
        routes_service.everybody,
        unsupported.router,
    ):
        app.include_router(router)
    app.add_middleware(ConcurrencyLimitMiddleware, turns=turns)
    app.openapi = lambda: document(app)
    return app
