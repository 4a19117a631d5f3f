"""Allowed hosts of weight sync. No torch. Host names are matched literally and not resolved, so
that DNS does not decide where requests go."""

import ipaddress
import socket
from collections.abc import Collection, Sequence
from contextlib import suppress

from penstock.server.protocol.types import Endpoint
from penstock.server.weight_sync.errors import refused

LOOPBACK = ("localhost", "127.0.0.0/8", "::1")
"""Allowed hosts if only users of this machine have access."""


def allowed_hosts(written: Sequence[str], *, requires_keys: bool) -> tuple[str, ...]:
    """The allowed hosts. If clients need keys, servers on this machine are only allowed if
    configured, because they may trust local connections."""
    return tuple(written) if requires_keys else (*LOOPBACK, *written)


def why_not_allowed(endpoint: Endpoint, allowed: Collection[str]) -> str | None:
    """Why a server is not allowed: its host matches none of these names and addresses (with port,
    if given) or networks (`10.0.0.0/8`). None if it is allowed."""
    host = endpoint.host.lower()
    if {host, endpoint.address.lower()} & {name.lower() for name in allowed}:
        return None
    for name in allowed:
        with suppress(ValueError):
            if ipaddress.ip_address(host) in ipaddress.ip_network(name):
                return None
    return (
        f"{host[:200]!r} is no host that is allowed ({', '.join(allowed) or 'none is'}).\n"
        "  The server's operator may add it, or its network, to sync_allowed_hosts."
    )


def require_allowed(endpoint: Endpoint, allowed: Collection[str]) -> None:
    """Raises SyncError for a host that is not allowed."""
    if fault := why_not_allowed(endpoint, allowed):
        raise refused(fault, endpoint)


def address_towards(endpoints: Collection[Endpoint]) -> str:
    """The local address that these endpoints can reach. Raises SyncError if there is no route."""
    addresses = {_own_address(endpoint) for endpoint in endpoints}
    outward = sorted(
        address for address in addresses if not ipaddress.ip_address(address).is_loopback
    )
    return outward[0] if outward else min(addresses)


def _own_address(endpoint: Endpoint) -> str:
    try:
        [family, _, _, _, address] = socket.getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            # Connecting a datagram socket sends nothing.
            asking.connect(address)
            return str(asking.getsockname()[0])
    except OSError as error:
        raise refused(f"there is no way to it: {error}", endpoint) from error
