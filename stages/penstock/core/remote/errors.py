"""Remote storage errors: access denied, not found, connection lost.

Each store's library raises its own types, so errors are classified by HTTP status. Clients wrap the
system's error in their own types, so the whole chain of causes is searched. Messages may contain
signed URLs: they are redacted, and exceptions are never chained.
"""

import errno
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Literal

from penstock.core import env
from penstock.core.errors import (
    CapabilityError,
    ConfigError,
    PenstockError,
    StageError,
)
from penstock.core.os_errors import describe_os_error, is_of_the_machine
from penstock.core.remote.addresses import PrivateAddressError
from penstock.core.remote.answers import AnswerError
from penstock.core.remote.urls import PACKAGE_OF, WEB, redact, redact_text, url_scheme

Fault = Literal["denied", "absent", "exists", "cut", "local", "other"]
"""Access denied, not found, already exists, connection lost, local disk error, and all others."""

Doing = Literal["read", "written", "deleted", "copied"]

_CREDENTIAL_ERRORS = {
    "ClientAuthenticationError",
    "CredentialRetrievalError",
    "DefaultCredentialsError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "RefreshError",
    "SSOTokenLoadError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
}
"""Exception types for missing or invalid credentials, raised without a status."""

_TRUNCATED_RESPONSES = {
    "ClientPayloadError",
    "IncompleteReadError",
    "ResponseStreamingError",
    "ServerDisconnectedError",
}
"""Exception types for a truncated response, whatever status a parser set."""

_NETWORK_LIBRARIES = (
    "aiohttp",
    "azure",
    "botocore",
    "gcsfs",
    "google",
    "httpx",
    "httpx2",
    "requests",
    "urllib3",
)
"""Libraries whose errors without a status are lost connections."""

_CONNECTION_ERRNOS = {
    # s3fs raises EBUSY for SlowDown and ServiceUnavailable, EREMOTEIO for InternalError.
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.EIO,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.EREMOTEIO,
    errno.ETIMEDOUT,
}


_TIMED_OUT = re.compile(r"timeout|timedout", re.IGNORECASE)
"""Parts of an exception type's name that mark a connection error."""

_REFUSED = re.compile(r"\[Errno 111\]|connection refused|connect call failed", re.IGNORECASE)
"""Messages of clients that try several addresses and report all of them in one text, without an
errno."""

_NO_NAME = re.compile(
    r"name or service not known|name resolution|nodename nor servname|no address associated"
    r"|failed to resolve",
    re.IGNORECASE,
)


class StorageError(Exception):
    """An error of a store's library, classified."""

    def __init__(self, kind: Fault, error: BaseException) -> None:
        super().__init__(kind)
        self.kind: Fault = kind
        self.error = error


def connection_fault(error: BaseException) -> str | None:
    """Why the connection failed, or None if the error is of another kind."""
    chain = list(iter_causes(error))
    for cause in chain:
        if isinstance(cause, socket.gaierror) or "DNSError" in type(cause).__name__:
            return "the server's name cannot be resolved (DNS)"
        if isinstance(cause, OSError) and cause.errno == errno.ECONNREFUSED:
            return "the connection was refused: nothing listens at that address"
        if isinstance(cause, OSError) and cause.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return "there is no network route to the server"
        if isinstance(cause, TimeoutError) or _TIMED_OUT.search(type(cause).__name__):
            return "the server did not answer in time (timeout)"
        if "Certificate" in type(cause).__name__ or "SSLError" in type(cause).__name__:
            return "the server's TLS certificate was not accepted"
    text = " ".join(str(error) for error in chain)
    if _REFUSED.search(text):
        return "the connection was refused: nothing listens at that address"
    return "the server's name cannot be resolved (DNS)" if _NO_NAME.search(text) else None


def iter_causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its chain of causes."""
    while error is not None:
        yield error
        error = error.__cause__


def classify_error(error: BaseException) -> Fault:
    """Classify an error by its HTTP status or that of its cause, else by its type."""
    for cause in iter_causes(error):
        if type(cause).__name__ in _CREDENTIAL_ERRORS:
            return "denied"
        if type(cause).__name__ in _TRUNCATED_RESPONSES:
            return "cut"
        status = http_status(cause)
        if status is not None:
            return _classify_status(status)
    # fsspec raises FileNotFoundError for a web server that it cannot reach.
    for cause in iter_causes(error.__cause__):
        if isinstance(error, FileNotFoundError) and _classify_type(cause) == "cut":
            return "cut"
    return _classify_type(error)


def _classify_type(error: BaseException) -> Fault:
    match error:
        case PermissionError():
            return "denied"
        case FileNotFoundError() | NotADirectoryError() | IsADirectoryError():
            return "absent"
        case FileExistsError():
            return "exists"
        case ConnectionError() | TimeoutError():
            return "cut"
        # The system's own only: errors of requests and aiohttp are subclasses of OSError too.
        case OSError() if type(error).__module__ == "builtins":
            return (
                "cut" if error.errno in _CONNECTION_ERRNOS or connection_fault(error) else "local"
            )
        case _:
            came_from = type(error).__module__.split(".")[0]
            return "cut" if came_from in _NETWORK_LIBRARIES else "other"


def http_status(error: BaseException) -> int | None:
    """The HTTP status of the error, under the attribute name of its library."""
    if isinstance(error, OSError) and str(error).startswith("Forbidden: "):
        return 403  # gcsfs has no type for it, and no attribute
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        status: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return status if isinstance(status, int) else None
    if isinstance(answered := getattr(response, "status_code", None), int):
        return answered
    for name in ("status", "status_code", "code"):
        value: Any = getattr(error, name, None)
        if isinstance(value, int):  # aiohttp warns of `code`, the same beside `status`
            return value if 100 <= value < 600 else None
        if isinstance(value, str) and value.isdigit() and len(value) == 3:
            return int(value)
    return None


def describe_error(error: BaseException) -> str:
    """Why the connection failed, or the error's type and first words, redacted."""
    for cause in iter_causes(error):
        if isinstance(cause, AnswerError):
            return redact_text(str(cause))[:400]  # it may quote a header of thousands of characters
    if reason := connection_fault(error):
        return reason
    if is_of_the_machine(error):
        return describe_os_error(error)
    for cause in iter_causes(error):
        if (status := http_status(cause)) is not None:
            phrase = HTTPStatus(status).phrase if status in list(HTTPStatus) else ""
            return f"the server answers {status} {phrase}".strip()
    text = redact_text(str(error.args[-1]) if error.args else "").strip().split("\n")[0][:160]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def retry_after(error: BaseException) -> float | None:
    """Seconds after which the server wants to be asked again (RFC 9110, 10.2.3), if it says so."""
    for cause in iter_causes(error):
        headers: Any = getattr(cause, "headers", None) or {}
        response: Any = getattr(cause, "response", None)
        if isinstance(response, dict):
            headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        text = str(headers.get("Retry-After") or headers.get("retry-after") or "")  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        if text.strip().isdecimal():
            return float(text)
        if not text:
            continue
        from email.utils import parsedate_to_datetime

        with suppress(ValueError, TypeError):
            return (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
    return None


def to_planning_error(fault: StorageError, url: str) -> PenstockError:
    """The user-facing error before any work has started."""
    if fault.kind == "denied":
        return access_denied_error(url, fault.error, "read")
    if fault.kind == "absent":
        return ConfigError(f"{redact(url)} does not exist.\n  Check its spelling.")
    reason = describe_error(fault.error)
    if isinstance(fault.error, PrivateAddressError):
        return CapabilityError(
            f"{redact(url)} cannot be read: {reason}.\n  Only a URL in the config may lead there."
        )
    endpoint = env.s3_endpoint() if PACKAGE_OF[url_scheme(url)] == "s3" else None
    store = f" and AWS_ENDPOINT_URL ({redact(endpoint)})" if endpoint else ""
    remedy = f"Check the network{store}, then run it again."
    if isinstance(fault.error, AnswerError) or any(map(http_status, iter_causes(fault.error))):
        remedy = "Run it again later; if it persists, the fault is the server's."
    return CapabilityError(f"{redact(url)} cannot be reached ({reason}).\n  {remedy}")


def to_run_error(fault: StorageError, url: str, doing: Doing) -> PenstockError:
    """The user-facing error of a run in progress, which can be resumed."""
    kind = fault.kind
    if kind == "denied":
        return access_denied_error(url, fault.error, doing)
    if kind == "absent":
        return StageError(
            f"{redact(url)} no longer exists; it did when this run was planned.\n"
            "  Restore it, or run again to plan without it."
        )
    if kind == "exists":
        return StageError(
            f"{redact(url)} was changed while it was being {doing}.\n"
            "  Run it again; what has not changed is reused."
        )
    failure = StageError(
        f"{redact(url)} could not be {doing}: {describe_error(fault.error)}.\n"
        "  Run it again when the connection is stable; completed work is kept."
    )
    failure.may_pass = kind == "cut"
    return failure


def access_denied_error(url: str, error: BaseException, doing: Doing) -> CapabilityError:
    """The user-facing error for access denied: which credentials were used, and what to set."""
    scheme = url_scheme(url)
    family = PACKAGE_OF[scheme] or "s3"
    credentials = env.credentials_for(family)
    status = next((s for s in map(http_status, iter_causes(error)) if s), None)
    reason = f"{status}" if status else type(error).__name__
    if scheme in WEB:
        return CapabilityError(
            f"{redact(url)} cannot be {doing}: access denied (the server answers {reason}).\n"
            "  Use a URL that is open to you, for example a signed one that has not expired."
        )
    used = (
        f"the credentials of {credentials} were used"
        if credentials
        else "no credentials were found"
    )
    return CapabilityError(
        f"{redact(url)} cannot be {doing}: access denied ({reason}); {used}.\n"
        f"  {_CREDENTIALS[family]}"
    )


def missing_package_error(url: str) -> CapabilityError:
    """The user-facing error for a URL scheme whose package is not installed."""
    extra = PACKAGE_OF[url_scheme(url)]
    package = f"'penstock[{extra}]'" if extra else "aiohttp"
    return CapabilityError(
        f"{redact(url)} needs a package that is not installed here.\n  Run: pip install {package}."
    )


_CREDENTIALS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, of an account with the "
    "right to do so (and AWS_ENDPOINT_URL for a store that is not Amazon's).",
    "gcs": "Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run: gcloud auth "
    "application-default login.",
    "azure": "Set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and "
    "AZURE_STORAGE_ACCOUNT_KEY, or run: az login.",
}


def _classify_status(status: int) -> Fault:
    if status in (401, 403, 407):
        return "denied"
    if status in (404, 410):
        return "absent"
    # 409: S3 answers two conditional writes at once with ConditionalRequestConflict, to be
    # repeated.
    if status in (408, 409, 425, 429) or status >= 500:
        return "cut"
    return "exists" if status == 412 else "other"
