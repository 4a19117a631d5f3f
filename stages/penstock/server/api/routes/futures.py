"""Futures routes: poll and cancel."""

import asyncio
from typing import Any, Literal

from fastapi import Request, Response

from penstock.server.api.context import AtDesk, RequestContext
from penstock.server.api.errors import ApiError
from penstock.server.api.futures import FutureRecord
from penstock.server.api.middleware.body_limit import JSON, PROTOBUF
from penstock.server.api.middleware.guarded_route import guarded_router
from penstock.server.api.schemas.requests import CancelBody, RetrieveBody
from penstock.server.api.schemas.responses import ResponseModel
from penstock.server.api.wire.encode_results import encode, json_of_failure
from penstock.server.api.wire.response_bodies import (
    PiecesResponse,
    ResultJob,
    is_small,
    negotiate_format,
    write,
)
from penstock.server.protocol.envelopes import Answer, Failure

router = guarded_router("futures")

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


class TryAgainResponse(ResponseModel):
    """The future waits."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: QueueState
    queue_state_reason: str | None = None


_ANY: dict[str, Any] = {"schema": {"type": "object"}}


@router.post(
    "/api/v1/retrieve_future",
    response_class=Response,
    responses={
        200: {
            "description": "A result, an error and its category, a size, or that it waits",
            "content": {JSON: _ANY, PROTOBUF: {"schema": {"type": "string", "format": "binary"}}},
        },
        408: {"model": TryAgainResponse, "description": "It waits, for a client that takes sizes"},
    },
)
async def retrieve_future(body: RetrieveBody, request: Request, desk: AtDesk) -> Response:
    """The result of a future, or after some seconds that it is still pending."""
    promise = desk.service.futures.find(body.request_id, desk.owner)
    if not promise.end.done():
        await _wait(promise, desk)
        await desk.service.turns.take()
    if not promise.end.done():
        return _try_again(promise, body, desk)
    if promise.end.cancelled():
        raise ApiError("it was never handed over; ask again", code="gone")
    payload, kind = await _payload(promise, request.headers.get("accept", ""), desk)
    if body.allow_metadata_only and len(payload) > desk.service.settings.max_inline_bytes:
        told = {"status": "complete_metadata", "response_payload_size": len(payload)}
        return Response(encode(told), media_type=JSON)
    return PiecesResponse(payload, media_type=kind)


@router.post("/api/v1/cancel_future", status_code=204)
async def cancel_future(body: CancelBody, desk: AtDesk) -> None:
    """Cancel a future that has not started; its outcome is retrieved like that of every future."""
    await desk.service.futures.cancel(body.request_id, desk.owner)


async def _wait(promise: FutureRecord, desk: RequestContext) -> None:
    """Wait until it is done, at most for the duration of a poll."""
    closing = asyncio.create_task(desk.service.closing.wait())
    try:
        await asyncio.wait(
            {promise.end, closing},
            timeout=desk.service.settings.poll_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
    finally:
        closing.cancel()


async def _payload(promise: FutureRecord, accept: str, desk: RequestContext) -> tuple[bytes, str]:
    """The encoded result of a future, and its media type."""
    end = promise.end.result()
    if isinstance(end, Failure):
        return encode(json_of_failure(end)), JSON
    assert isinstance(end, Answer)
    form = negotiate_format(end.result, accept)
    kind = PROTOBUF if form == "protobuf" else JSON
    if is_small(end.result, promise.result_size, form):
        return write(end.result, promise.shape, form, promise.result_size), kind
    async with promise.writing:
        payload = promise.payloads.get(form)
        if payload is None:
            payload = await desk.service.codecs.write(
                desk.owner, ResultJob(shape=promise.shape, form=form), end.result
            )
            desk.service.futures.keep_payload(promise, form, payload)
    return payload, kind


def _try_again(promise: FutureRecord, body: RetrieveBody, desk: RequestContext) -> Response:
    status = desk.service.link.status
    waits = status is None or status.workers != "ready"
    told = TryAgainResponse(
        request_id=promise.id,
        queue_state="paused_capacity" if waits else "active",
        queue_state_reason=_reason(desk) if waits else None,
    )
    # The SDK takes a 408 as its short form; xorl's clients read the body of a 200.
    code = 200 if body.allow_metadata_only is None else 408
    return Response(encode(told.model_dump(exclude_none=True)), code, media_type=JSON)


def _reason(desk: RequestContext) -> str:
    status = desk.service.link.status
    if status is None:
        return "the engine is started again"
    return status.reason or f"the workers are {status.workers}"
