"""FastAPI application of the training server. No torch and no training code."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from penstock.server.api.connections import Connections
from penstock.server.api.context import AppState
from penstock.server.api.errors import (
    ApiError,
    handle_api_error,
    handle_crash,
    handle_http_error,
    handle_validation_error,
)
from penstock.server.api.futures import Futures
from penstock.server.api.metrics import Metrics
from penstock.server.api.middleware.auth import ApiKeys
from penstock.server.api.middleware.body_limit import BodyMemory
from penstock.server.api.middleware.concurrency_limit import (
    ConcurrencyLimit,
    ConcurrencyLimitMiddleware,
)
from penstock.server.api.middleware.rate_limit import RateLimit
from penstock.server.api.openapi import document
from penstock.server.api.routes import checkpoints, sampling, training, unsupported, weight_sync
from penstock.server.api.routes import futures as routes_futures
from penstock.server.api.routes import service as routes_service
from penstock.server.api.scheduler_client import SchedulerClient
from penstock.server.api.session_heartbeats import SessionHeartbeats
from penstock.server.api.settings import ApiSettings
from penstock.server.api.wire.codec_pool import CodecPool
from penstock.server.protocol.codec import Channel, Encoded
from penstock.server.protocol.envelopes import FromScheduler, ToScheduler

# Bytes of concurrent request bodies in addition to one body of maximum size, so that one owner
# cannot block the others.
SHARED_BYTES = 128 << 20


def create_app(
    channel: Channel[ToScheduler | Encoded, FromScheduler], settings: ApiSettings
) -> FastAPI:
    """Create the application; it uses `channel` between startup and shutdown."""
    scheduler = SchedulerClient(channel)
    futures = Futures(
        scheduler,
        ttl=settings.future_ttl,
        max_pending=settings.max_pending_requests,
        max_result_bytes=settings.max_result_bytes,
    )
    heartbeats = SessionHeartbeats(
        scheduler,
        idle_timeout=settings.idle_session_timeout,
        answer_timeout=settings.answer_timeout,
    )
    concurrency = ConcurrencyLimit()
    service = AppState(
        settings=settings,
        scheduler=scheduler,
        futures=futures,
        heartbeats=heartbeats,
        concurrency=concurrency,
        keys=ApiKeys(settings.keys),
        rate_limit=RateLimit(settings.requests_per_minute),
        metrics=Metrics(),
        body_memory=BodyMemory(
            settings.max_request_bytes + SHARED_BYTES, settings.max_request_bytes
        ),
        codec_pool=CodecPool(settings.max_request_bytes, settings.image_processor),
        connections=Connections(settings.max_connections),
        quantization={},
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loops = (
            scheduler.listen(),
            scheduler.greet(),
            futures.sweep_periodically(),
            heartbeats.forward_periodically(),
            service.connections.sweep_periodically(),
        )
        tasks = [asyncio.create_task(loop) for loop in loops]
        yield
        await service.codec_pool.stop()
        for task in reversed(tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        scheduler.close()

    # The Swagger and ReDoc pages are disabled: they load scripts from a CDN.
    app = FastAPI(
        title="Penstock training server", lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.service = service
    app.add_exception_handler(ApiError, handle_api_error)
    app.add_exception_handler(HTTPException, handle_http_error)
    app.add_exception_handler(RequestValidationError, handle_validation_error)
    # Starlette raises the exception again after this response; uvicorn then logs it.
    app.add_exception_handler(Exception, handle_crash)
    # Routes are matched in this order: the most frequent ones first.
    for router in (
        routes_futures.router,
        routes_service.router,
        training.router,
        sampling.router,
        checkpoints.router,
        weight_sync.router,
        routes_service.public_router,
        unsupported.router,
    ):
        app.include_router(router)
    app.add_middleware(ConcurrencyLimitMiddleware, concurrency=concurrency)
    app.openapi = lambda: document(app)
    return app
