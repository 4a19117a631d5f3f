"""API key authentication: maps a key to an owner. Keys are neither logged nor forwarded."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from penstock.server.api.errors import ApiError

NOBODY = "local"  # The owner of everything if no keys are required
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")  # Host names of this machine for itself


def owner_of_key(key: str) -> str:
    """The first 16 hex digits of the key's SHA-256."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


class ApiKeys:
    """The valid API keys."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = {hashlib.sha256(key.encode()).digest(): owner_of_key(key) for key in keys}

    def owner(self, headers: Mapping[str, str]) -> str:
        """The owner of a request, from `X-API-Key` or `Authorization: Bearer`. Raises ApiError
        (401) for an unknown key; and, if no keys are required, 421 for the host name of another
        machine, which prevents DNS rebinding from a browser."""
        if not self._digests:
            host = headers.get("host", "")
            # An IPv6 address without a port ends with a bracket, and has colons itself.
            name = host if host.endswith("]") else host.rsplit(":", 1)[0]
            if name.lower() not in LOOPBACK:
                raise ApiError(
                    "this server requires no keys and can only be reached as localhost; give it"
                    " keys to reach it under another name",
                    status=421,
                )
            return NOBODY
        key = headers.get("x-api-key")
        if not key:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            key = token.strip() if scheme.lower() == "bearer" else ""
        # Hashed, because compare_digest takes another time for texts of other lengths.
        digest = hashlib.sha256(key.encode()).digest()
        matching_owner = ""
        # Compare with all keys in constant time, so that timing reveals nothing.
        for key_digest, owner in self._digests.items():
            if hmac.compare_digest(key_digest, digest):
                matching_owner = owner
        if not matching_owner:
            raise ApiError(
                "the key is missing or unknown: send one of the server's keys as X-API-Key, or as"
                " Authorization: Bearer",
                status=401,
            )
        return matching_owner
