"""Whether Prefect's server can be reached, asked before a flow starts."""

import socket
from urllib.parse import urlsplit

from prefect.settings import PREFECT_API_URL

from penstock.core.errors import UnreachableError

TIMEOUT = 10.0
"""Seconds to connect."""

PORTS = {"http": 80, "https": 443}


def require_server() -> None:
    """Raise UnreachableError if PREFECT_API_URL is set, in the environment or in Prefect's profile,
    and nothing listens there. Without it, Prefect starts a server of its own."""
    url = PREFECT_API_URL.value()
    if not url:
        return
    parts = urlsplit(url)
    try:
        port = parts.port or PORTS.get(parts.scheme, 443)
        with socket.create_connection((parts.hostname or "", port), TIMEOUT):
            return
    except (OSError, ValueError) as error:
        raise UnreachableError(
            f"Prefect's server at {url} (PREFECT_API_URL) cannot be reached: {error}.\n"
            "  Start it (prefect server start), correct PREFECT_API_URL, or unset it to use a "
            "temporary server; penstock run needs none."
        ) from None


def no_temporary_server(error: RuntimeError) -> UnreachableError:
    """The error for a temporary server that Prefect has started and that does not answer."""
    return UnreachableError(
        f"Prefect's temporary server did not start: {error}.\n"
        "  Run it again, or start a server (prefect server start) and set PREFECT_API_URL; "
        "penstock run needs none."
    )
