"""Where machines that train together meet, and by which address each is reached."""

import ipaddress
import socket
import time

from penstock.core.errors import StageError

PORT = 29500
"""Of the first machine, where nobody has written another."""

MEETING_SECONDS = 900.0
"""How long a machine waits for the first one: its image may still be pulled."""


def parts_of(endpoint: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`. Raises ValueError for anything else."""
    host, _, port = endpoint.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{endpoint!r} is no host:port")
    return bare, int(port)


def meet(endpoint: str, number: int, patience: float = MEETING_SECONDS) -> str:
    """The address by which the others reach this machine, the one of that `number`.

    The first machine is reached as the endpoint says. Any other waits until the first one listens,
    and is reached by the address from which it speaks to it. Raises StageError after `patience`
    seconds.
    """
    host, port = parts_of(endpoint)
    if number == 0:
        return host
    deadline = time.monotonic() + patience
    while True:
        try:
            with socket.create_connection((host, port), timeout=5.0) as there:
                return str(there.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise StageError(
                    f"machine {number} cannot reach launch.rdzv_endpoint {endpoint} for "
                    f"{patience:.0f} s: {error}.\n"
                    "  Start the first machine (launch.node_rank 0), and see that its name and "
                    "port are open to the others."
                ) from error
        time.sleep(1.0)


def reachable(host: str, port: int) -> bool:
    """Whether something listens there."""
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError:
        return False
    return True


def listening_address(host: str) -> str:
    """The address of this machine that `host` stands for, at which alone to listen.

    "" (every address) where it stands for none that others could reach as well: an address that is
    translated on the way here, or this machine's own name for itself (127.0.1.1 in `/etc/hosts`).
    """
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return ""
    is_loopback = ipaddress.ip_address(str(address).partition("%")[0]).is_loopback
    return "" if is_loopback and not _means_loopback(host) else str(address)


def _means_loopback(host: str) -> bool:
    """Whether it is loopback on every machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def loopback_interface() -> str:
    """`lo` on Linux, `lo0` elsewhere."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
