"""Error responses: one JSON schema for all errors, of the API and of the scheduler."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from penstock.server.protocol.codec import Category, Code, error_category

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
"""The HTTP status of each error code, for calls that return their result directly."""

MAX_VALIDATION_ERRORS = 20


class ApiError(HTTPException):
    """A request error with its HTTP status."""

    def __init__(
        self,
        error: str,
        *,
        code: Code = "invalid",
        status: int | None = None,
        category: Category | None = None,
        retry_after: float | None = None,
    ) -> None:
        """`error`: the message with its numbers, and what to do. `category` and `retry_after`, in
        seconds, follow from the code, unless given; an error with another status has no latter."""
        if retry_after is None and status is None and code in ("busy", "lost", "unavailable"):
            retry_after = 1.0
        # HTTP has whole seconds, and 0 would mean at once.
        headers = None if retry_after is None else {"Retry-After": f"{max(1, round(retry_after))}"}
        super().__init__(status or STATUS[code], detail=error, headers=headers)
        self.error = error
        self.code: Code = code
        self.category: Category = category or error_category(code)


async def handle_api_error(_: Request, error: Exception) -> JSONResponse:
    """Response body of an ApiError."""
    # Starlette's type of a handler takes any Exception, whatever it is registered for.
    assert isinstance(error, ApiError)
    return _error_response(
        error.status_code, error.error, error.category, error.code, error.headers
    )


async def handle_http_error(request: Request, error: Exception) -> JSONResponse:
    """Response body of the framework's own errors: unknown path, unsupported method."""
    assert isinstance(error, HTTPException)
    message = error.detail or "it is refused"
    text = f"{request.method} {request.url.path[:200]}: {message}"
    code: Code = "not_found" if error.status_code in (404, 405) else "invalid"
    return _error_response(error.status_code, text, "user", code, error.headers)


async def handle_validation_error(_: Request, error: Exception) -> JSONResponse:
    """Response body of validation errors: each error and its location, never the input."""
    assert isinstance(error, RequestValidationError)
    errors = [
        {
            "loc": [part if isinstance(part, int) else str(part)[:100] for part in item["loc"]],
            "msg": item["msg"],
            "type": item["type"],
        }
        for item in error.errors()[:MAX_VALIDATION_ERRORS]
    ]
    message = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in errors)
    return _error_response(422, message, "user", "invalid", None, errors)


async def handle_crash(_: Request, __: Exception) -> JSONResponse:
    """Response body of an internal error: the traceback is logged but not sent."""
    # Starlette's ServerErrorMiddleware raises it again after this response, so uvicorn logs it.
    return _error_response(500, "the server failed; its log says why", "server", "internal", None)


def _error_response(
    status: int,
    error: str,
    category: Category,
    code: Code,
    headers: Mapping[str, str] | None,
    errors: Sequence[Any] = (),
) -> JSONResponse:
    body: dict[str, Any] = {"error": error, "category": category, "code": code}
    if errors:
        body["detail"] = errors
    return JSONResponse(body, status, dict(headers or {}))
