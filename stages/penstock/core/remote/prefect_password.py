"""Whether a Prefect server answers without a password."""

import urllib.request
from urllib.error import HTTPError, URLError

TIMEOUT = 5.0
"""Seconds."""

WITHOUT_PASSWORD = (
    "answers without a password: whoever reaches it, a page in a browser on its machine included, "
    "can run commands on its workers; start it with PREFECT_SERVER_API_AUTH_STRING and set "
    "PREFECT_API_AUTH_STRING for workers and commands"
)


def answers_without_password(api_url: str) -> bool:
    """Whether the server at `PREFECT_API_URL` answers a request that has no password.

    False if it cannot be reached.
    """
    if not api_url.startswith(("http://", "https://")):
        return False
    try:
        # Not /health or /ready, which Prefect answers without the password in any case.
        with urllib.request.urlopen(f"{api_url.rstrip('/')}/admin/version", timeout=TIMEOUT):
            return True
    except (HTTPError, URLError, OSError, ValueError):
        return False
