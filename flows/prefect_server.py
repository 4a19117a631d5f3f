"""Whether Prefect's server can be reached, and whether by anybody, asked before a flow starts."""

import socket
import sys
from urllib.parse import urlsplit

from prefect.settings import PREFECT_API_URL

from penstock.core.errors import UnreachableError
from penstock.core.remote.prefect_password import WITHOUT_PASSWORD, asks_for_password

TIMEOUT = 10.0
"""Seconds to connect."""


def require_server() -> bool:
    """Whether PREFECT_API_URL is set, in the environment or in Prefect's profile.

    Raises UnreachableError if nothing listens there; warns of a server without a password.
    """
    url = PREFECT_API_URL.value()
    if not url:
        return False
    parts = urlsplit(url)
    try:
        port = parts.port or (80 if parts.scheme == "http" else 443)
        # No request: Prefect's client would retry it PREFECT_CLIENT_MAX_RETRIES times.
        with socket.create_connection((parts.hostname or "", port), TIMEOUT):
            pass
    except (OSError, ValueError) as error:
        raise UnreachableError(
            f"Prefect's server at {url} (PREFECT_API_URL) cannot be reached: {error}.\n"
            "  Start it (prefect server start), correct PREFECT_API_URL, or unset it to use a "
            "temporary server; penstock run needs none."
        ) from None
    if asks_for_password(url) is False:
        sys.stderr.write(f"warning: Prefect's server at {url} {WITHOUT_PASSWORD}\n")
    return True
