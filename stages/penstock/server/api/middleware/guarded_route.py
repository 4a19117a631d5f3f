"""Guarded routes: API key, rate limit, body limit and metrics before each route. This is not done
in FastAPI dependencies, because those run after the body has been read and parsed."""

import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException

from penstock.server.api.checkpoint_uris import ModelName
from penstock.server.api.context import AppState
from penstock.server.api.errors import ApiError
from penstock.server.api.http_protocol import get_connection
from penstock.server.api.middleware.body_limit import BoundedRequest
from penstock.server.api.schemas.requests import Seq

UNCOUNTED = ("/api/v1/session_heartbeat", "/api/v1/retrieve_future")
"""Routes that clients poll, which are exempt from the rate limit."""

_MODEL: TypeAdapter[str] = TypeAdapter(ModelName)
_SEQ: TypeAdapter[int] = TypeAdapter(Seq)


class OpenRoute(APIRoute):
    """A route without authentication."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        serve = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            service: AppState = request.app.state.service
            bounded = BoundedRequest(
                request.scope,
                request.receive,
                service.settings.max_request_bytes,
                service.body_memory,
            )
            began, status = time.perf_counter(), 500
            try:
                self.admit(service, bounded)
                response = await serve(bounded)
            except HTTPException as error:
                status = error.status_code
                # After others, such as 429, a client sends the request again, with the same number.
                if status in (400, 413):
                    await _skip_sequence_number(service, bounded)
                raise
            except RequestValidationError:
                status = 422
                await _skip_sequence_number(service, bounded)
                raise
            else:
                status = response.status_code
                return response
            finally:
                bounded.release()
                seconds = time.perf_counter() - began
                service.metrics.observe(self.path, request.method, status, seconds)

        return guarded

    def admit(self, service: AppState, request: BoundedRequest) -> None:
        """Raises ApiError if the request is rejected."""


class GuardedRoute(OpenRoute):
    """A route with authentication and rate limit."""

    def admit(self, service: AppState, request: BoundedRequest) -> None:
        """Raises ApiError: 401, 421 or 429; 400 for an unknown query parameter."""
        request.state.owner = owner = service.keys.owner(request.headers)
        if (connection := get_connection(request)) is not None:
            service.connections.identify(connection, owner)
        if request.scope["query_string"]:
            strange = sorted(set(request.query_params) - set(_query_names(self.dependant)))
            if strange:
                raise ApiError(f"unknown query parameter {strange[0][:100]!r}")
        if self.path not in UNCOUNTED:
            service.rate_limit.take(owner)


def guarded_router(tag: str) -> APIRouter:
    """A router of guarded routes."""
    return APIRouter(route_class=GuardedRoute, tags=[tag])


def _query_names(dependant: Dependant) -> Iterator[str]:
    """The query parameters of a route and its dependencies."""
    yield from (field.alias for field in dependant.query_params)
    for dependency in dependant.dependencies:
        yield from _query_names(dependency)


async def _skip_sequence_number(service: AppState, request: BoundedRequest) -> None:
    """Skip the sequence number of a rejected request, if it has one."""
    body = request.parsed
    if not isinstance(body, dict) or "seq_id" not in body or "sampling_session_id" in body:
        return
    try:
        model = _MODEL.validate_python(body.get("model_id", "default"))
        seq = _SEQ.validate_python(body["seq_id"])
    except ValidationError:
        return
    await service.futures.skip_sequence_number(request.state.owner, model, seq)
