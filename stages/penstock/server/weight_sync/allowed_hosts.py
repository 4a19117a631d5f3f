"""Which hosts are sent anything: those that the settings allow, and no others. No torch.

A name is allowed as it is written, never by what it stands for: who names servers elsewhere does
not decide where requests go.
"""

import ipaddress
import socket
from collections.abc import Collection, Sequence

from penstock.server.protocol.types import Endpoint
from penstock.server.weight_sync.errors import refused

LOOPBACK = ("localhost", "127.0.0.0/8", "::1")
"""What is allowed where nobody but this machine's own users ask for it."""


def allowed_hosts(written: Sequence[str], *, requires_keys: bool) -> tuple[str, ...]:
    """What is allowed where the settings name these. Where clients have keys, this machine's own
    servers are allowed only where the settings name them: they may trust whoever reaches them."""
    return tuple(written) if requires_keys else (*LOOPBACK, *written)


def why_not_allowed(endpoint: Endpoint, allowed: Collection[str]) -> str | None:
    """Why nothing is sent to a server whose host is neither one of these names and addresses (with
    its port, where one is named), nor an address in one of these networks (`10.0.0.0/8`); None for
    one that is."""
    host = endpoint.host.lower()
    if {host, f"{_in_brackets(host)}:{endpoint.port}"} & {name.lower() for name in allowed}:
        return None
    address = _address(host)
    if address and any(address in network for network in map(_network, allowed) if network):
        return None
    return (
        f"{host[:200]!r} is no host that is allowed ({', '.join(allowed) or 'none is'}).\n"
        "  Whoever runs the server may add it, or its network, to sync_allowed_hosts."
    )


def require_allowed(endpoint: Endpoint, allowed: Collection[str]) -> None:
    """Raises SyncError for a host that is not allowed."""
    fault = why_not_allowed(endpoint, allowed)
    if fault is not None:
        raise refused(fault, endpoint)


def address_towards(endpoints: Collection[Endpoint]) -> str:
    """The address by which these reach this machine. Raises SyncError where there is no way."""
    found = {_own_address(endpoint) for endpoint in endpoints}
    outward = sorted(address for address in found if not ipaddress.ip_address(address).is_loopback)
    return outward[0] if outward else min(found)


def _own_address(endpoint: Endpoint) -> str:
    try:
        [family, _, _, _, there] = socket.getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            # Of a datagram socket this sends nothing.
            asking.connect(there)
            return str(asking.getsockname()[0])
    except OSError as error:
        raise refused(f"there is no way to it: {error}", endpoint) from error


def _in_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _network(name: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(name)
    except ValueError:
        return None
