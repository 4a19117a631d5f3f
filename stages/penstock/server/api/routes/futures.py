"""Futures routes: poll and cancel."""

import asyncio
from typing import Any, Literal

from fastapi import Request, Response

from penstock.server.api.context import Context, RequestContext
from penstock.server.api.errors import ApiError
from penstock.server.api.futures import FutureRecord
from penstock.server.api.middleware.body_limit import JSON, PROTOBUF
from penstock.server.api.middleware.guarded_route import guarded_router
from penstock.server.api.schemas.requests import CancelBody, RetrieveBody
from penstock.server.api.schemas.responses import ResponseModel
from penstock.server.api.wire.response_bodies import (
    ChunkedResponse,
    ResultJob,
    encode,
    is_small,
    json_of_failure,
    negotiate_format,
    write,
)
from penstock.server.protocol.envelopes import Failure

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
async def retrieve_future(body: RetrieveBody, request: Request, context: Context) -> Response:
    """The result of a future, or after some seconds that it is still pending."""
    future = context.service.futures.find(body.request_id, context.owner)
    if not future.response.done():
        # A task, as asyncio.wait takes no coroutines (Python 3.11). Unlike wait_for it leaves a
        # future that has not ended as it is, for the next poll.
        shutting_down = asyncio.create_task(context.service.shutting_down.wait())
        try:
            await asyncio.wait(
                {future.response, shutting_down},
                timeout=context.service.settings.poll_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            shutting_down.cancel()
        # Many polls end at once when a batch is done: they queue for their answers, too.
        await context.service.concurrency.take()
    if not future.response.done():
        return _pending_response(future, body, context)
    if future.response.cancelled():
        raise ApiError("it was never submitted; send it again", code="gone")
    payload, media_type = await _encode_result(future, request.headers.get("accept", ""), context)
    if body.allow_metadata_only and len(payload) > context.service.settings.max_inline_bytes:
        response = {"status": "complete_metadata", "response_payload_size": len(payload)}
        return Response(encode(response), media_type=JSON)
    return ChunkedResponse(payload, media_type=media_type)


@router.post("/api/v1/cancel_future", status_code=204)
async def cancel_future(body: CancelBody, context: Context) -> None:
    """Cancel a future that has not started; its outcome is retrieved like that of every future."""
    await context.service.futures.cancel(body.request_id, context.owner)


async def _encode_result(
    future: FutureRecord, accept: str, context: RequestContext
) -> tuple[bytes, str]:
    """The encoded result of a future, and its media type."""
    outcome = future.response.result()
    if isinstance(outcome, Failure):
        return encode(json_of_failure(outcome)), JSON
    encoding = negotiate_format(outcome.result, accept)
    media_type = PROTOBUF if encoding == "protobuf" else JSON
    if is_small(outcome.result, future.result_size, encoding):
        return write(outcome.result, future.result_format, encoding, future.result_size), media_type
    async with future.encode_lock:
        payload = future.payloads.get(encoding)
        if payload is None:
            payload = await context.service.codec_pool.write(
                context.owner,
                ResultJob(result_format=future.result_format, encoding=encoding),
                outcome.result,
            )
            context.service.futures.cache_payload(future, encoding, payload)
    return payload, media_type


def _pending_response(
    future: FutureRecord, body: RetrieveBody, context: RequestContext
) -> Response:
    status, reason = context.service.scheduler.status, None
    if status is None:
        reason = "the scheduler is being restarted"
    elif status.workers != "ready":
        reason = status.reason or f"the workers are {status.workers}"
    response = TryAgainResponse(
        request_id=future.id,
        queue_state="active" if reason is None else "paused_capacity",
        queue_state_reason=reason,
    )
    # The SDK takes a 408 as its short form; xorl's clients read the body of a 200.
    code = 200 if body.allow_metadata_only is None else 408
    return Response(encode(response.model_dump(exclude_none=True)), code, media_type=JSON)
