"""Multi-node rendezvous: the endpoint, and the address of each machine."""

import ipaddress
import socket
import time
from contextlib import suppress

from penstock.core.errors import StageError
from penstock.core.machine.linux import interface_of

PORT = 29500  # Default port of the first machine

# Seconds that a machine waits for the first one, whose image may still be pulled.
RENDEZVOUS_TIMEOUT_SECONDS = 900.0


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`. Raises ValueError for anything else."""
    host, _, port = endpoint.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{endpoint!r} is no host:port")
    return bare, int(port)


def rendezvous_address(
    endpoint: str, number: int, patience: float = RENDEZVOUS_TIMEOUT_SECONDS
) -> str:
    """The address by which other machines reach this machine, which has that `number`.

    The first machine uses the endpoint's host. Other machines wait until the first one listens, and
    use the local address of their connection to it. Raises StageError after `patience` seconds.
    """
    host, port = parse_endpoint(endpoint)
    if number == 0:
        return host
    deadline = time.monotonic() + patience
    while True:
        try:
            with socket.create_connection((host, port), timeout=5.0) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise StageError(
                    f"node {number} could not reach launch.rdzv_endpoint {endpoint} for "
                    f"{patience:.0f} s: {error}.\n"
                    "  Start node 0 (launch.node_rank 0), and check that the other nodes can "
                    "resolve its name and reach its port."
                ) from error
        time.sleep(1.0)


def reachable(host: str, port: int) -> bool:
    """Whether a server listens at that address."""
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError:
        return False
    return True


def listening_address(host: str) -> str:
    """The local address of `host` to listen on.

    "" (all addresses) if `host` is not a local address that others can reach: a NAT address, or
    this machine's own host name (127.0.1.1 in `/etc/hosts`).
    """
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
        with socket.socket(family) as probe:
            # Only an address of this machine can be bound.
            probe.bind((address, 0))
    except OSError:
        return ""
    # A link-local IPv6 address ends with its zone: fe80::1%eth0.
    is_loopback = ipaddress.ip_address(str(address).partition("%")[0]).is_loopback
    return "" if is_loopback and not is_loopback_host(host) else str(address)


def interface_towards(host: str) -> str | None:
    """The network interface by which this machine reaches `host`, or is reached as `host`. None if
    unknown: not on Linux, over IPv6, or for this machine's own host name (127.0.1.1)."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, PORT))  # Connecting a datagram socket sends nothing.
        own = asking.getsockname()[0]
        if ipaddress.ip_address(own).is_loopback and not is_loopback_host(host):
            return None
        return interface_of(own, asking)
    return None


def is_loopback_host(host: str) -> bool:
    """Whether the host is loopback on every machine: only this one can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def loopback_interface() -> str:
    """`lo` on Linux, `lo0` elsewhere."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
