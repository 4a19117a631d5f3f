"""Connection error messages: connection refused, timeout, unknown host.

Clients wrap the system's error in their own types, so the whole chain of causes is searched.
"""

import errno
import re
import socket
from collections.abc import Iterator

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
