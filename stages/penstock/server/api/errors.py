"""How a request is refused: one shape of body for every error, of ours and of the engine's."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from penstock.server.protocol.codec import Category, Code
from penstock.server.protocol.envelopes import Failure

STATUS: Mapping[Code, int] = {
    "invalid": 400,
    "not_found": 404,
    "exists": 409,
    "gone": 410,
    "busy": 429,
    "storage_limit": 507,
    "not_finite": 422,
    "cancelled": 409,
    "lost": 503,
    "unavailable": 503,
    "internal": 500,
}
"""The HTTP status of each kind of failure, for calls that are answered at once."""

MAX_FAULTS = 20
"""Of one body, that are told."""


class ApiError(HTTPException):
    """A request that is not served, and why."""

    def __init__(
        self,
        error: str,
        *,
        code: Code = "invalid",
        status: int | None = None,
        category: Category = "user",
        retry_after: float | None = None,
    ) -> None:
        """`error`: the fault with its numbers, and the next step. `retry_after`: seconds."""
        headers = None if retry_after is None else {"Retry-After": f"{max(1, round(retry_after))}"}
        super().__init__(status or STATUS[code], detail=error, headers=headers)
        self.error = error
        self.code: Code = code
        self.category: Category = category


def to_api_error(failure: Failure) -> ApiError:
    """What the engine says did not go, as the answer to a call that waited for it."""
    again = 1.0 if failure.code in ("busy", "lost", "unavailable") else None
    return ApiError(failure.error, code=failure.code, category=failure.category, retry_after=again)


async def answer_refusal(_: Request, refusal: Exception) -> JSONResponse:
    """The body of a Refusal."""
    assert isinstance(refusal, ApiError)
    return _told(
        refusal.status_code, refusal.error, refusal.category, refusal.code, refusal.headers
    )


async def answer_http(request: Request, error: Exception) -> JSONResponse:
    """The body of what the framework refuses by itself: no such path, no such method."""
    assert isinstance(error, HTTPException)
    said = error.detail or "it is refused"
    text = f"{request.method} {request.url.path[:200]}: {said}"
    code: Code = "not_found" if error.status_code in (404, 405) else "invalid"
    return _told(error.status_code, text, "user", code, error.headers)


async def answer_faults(_: Request, error: Exception) -> JSONResponse:
    """The body of what does not fit its schema: each fault and where it is, never what was sent."""
    assert isinstance(error, RequestValidationError)
    faults = [
        {"loc": [_short(part) for part in fault["loc"]], "msg": fault["msg"], "type": fault["type"]}
        for fault in error.errors()[:MAX_FAULTS]
    ]
    said = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults)
    return _told(422, said, "user", "invalid", None, faults)


async def answer_crash(_: Request, __: Exception) -> JSONResponse:
    """The body where the fault is ours: its traceback is in the log, and nothing of it is told."""
    return _told(500, "the server failed; its log says why", "server", "internal", None)


def _short(part: object) -> str | int:
    return part if isinstance(part, int) else str(part)[:100]


def _told(
    status: int,
    error: str,
    category: Category,
    code: Code,
    headers: Mapping[str, str] | None,
    faults: Sequence[Any] = (),
) -> JSONResponse:
    body: dict[str, Any] = {"error": error, "category": category, "code": code}
    if faults:
        body["detail"] = faults
    return JSONResponse(body, status, dict(headers or {}))
