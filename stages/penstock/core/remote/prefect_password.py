"""Whether a Prefect server asks for a password."""

import urllib.request
from urllib.error import HTTPError, URLError

TIMEOUT = 5.0  # Seconds

WITHOUT_PASSWORD = (
    "answers without a password: whoever reaches it, a page in a browser on its machine included, "
    "can run commands on its workers; start it with PREFECT_SERVER_API_AUTH_STRING and set "
    "PREFECT_API_AUTH_STRING for workers and commands"
)


def asks_for_password(api_url: str) -> bool | None:
    """Whether the server at `PREFECT_API_URL` refuses a request that has no password. None if it
    cannot be reached within `TIMEOUT`, or answers with another error."""
    if not api_url.startswith(("http://", "https://")):
        return None
    try:
        # Not /health or /ready, which Prefect answers without the password in any case.
        with urllib.request.urlopen(f"{api_url.rstrip('/')}/admin/version", timeout=TIMEOUT):
            return False
    except HTTPError as error:
        return True if error.code in {401, 403} else None
    except (URLError, OSError, ValueError):
        return None
