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
    for each in chain:
        if isinstance(each, socket.gaierror) or "DNSError" in type(each).__name__:
            return "the server's name cannot be resolved (DNS)"
        if isinstance(each, OSError) and each.errno == errno.ECONNREFUSED:
            return "the connection was refused: nothing listens at that address"
        if isinstance(each, OSError) and each.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return "there is no network route to the server"
        if isinstance(each, TimeoutError) or _TIMED_OUT.search(type(each).__name__):
            return "the server did not answer in time (timeout)"
        if "Certificate" in type(each).__name__ or "SSLError" in type(each).__name__:
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
