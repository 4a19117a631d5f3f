"""Why a server could not be asked, in words: refused, no answer in time, no such name.

Every client wraps the system's error in some of its own, so the whole chain of causes is looked at.
"""

import errno
import re
import socket
from collections.abc import Iterator

_TIMED_OUT = re.compile(r"timeout|timedout", re.IGNORECASE)
"""In the name of an exception's type."""

_REFUSED = re.compile(r"\[Errno 111\]|connection refused|connect call failed", re.IGNORECASE)
"""What clients say that try several addresses and tell of all in one text, without an errno."""

_NO_NAME = re.compile(
    r"name or service not known|name resolution|nodename nor servname|no address associated"
    r"|failed to resolve",
    re.IGNORECASE,
)


def connection_fault(error: BaseException) -> str | None:
    """Why the connection failed, or None where the error tells of something else."""
    chain = list(causes(error))
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
    text = " ".join(str(each) for each in chain)
    if _REFUSED.search(text):
        return "the connection was refused: nothing listens at that address"
    return "the server's name cannot be resolved (DNS)" if _NO_NAME.search(text) else None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__
