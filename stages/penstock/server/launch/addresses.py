"""Bind and connect addresses of the server's processes."""

import socket

from penstock.config.server.config import ServerConfig
from penstock.core.errors import ConfigError

LOOPBACK = "127.0.0.1"
EVERYWHERE = {"0.0.0.0": LOOPBACK, "::": "::1", "*": LOOPBACK}
"""Wildcard hosts, and the local address that reaches them."""


def near(host: str) -> str:
    """The host as reached from this machine."""
    return EVERYWHERE.get(host, host)


def tcp(host: str, port: int) -> str:
    """`tcp://host:port`, with brackets for an IPv6 address."""
    return f"tcp://{in_url(host)}:{port}"


def in_url(host: str) -> str:
    """The host, with brackets for an IPv6 address."""
    return f"[{host}]" if ":" in host else host


def parse_host(address: str) -> str:
    """The host of `tcp://host:port`."""
    return address.removeprefix("tcp://").rpartition(":")[0].removeprefix("[").removesuffix("]")


def parse_port(address: str) -> int:
    """The port of `tcp://host:port`."""
    return int(address.rpartition(":")[2])


def free_port(host: str, port: int, field: str) -> int:
    """The given port of the host, or a free one for 0. Raises ConfigError if the address cannot be
    bound; `field` is its setting."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        # asyncio and ZeroMQ set it too: a port in TIME_WAIT, of a server that just ended, is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # `*` is ZeroMQ's word for all interfaces, an empty string Python's.
            listener.bind(("" if host == "*" else host, port))
        except OSError as error:
            raise ConfigError(
                f"nothing can listen at {in_url(host)}:{port} ({field}):"
                f" {(error.strerror or str(error)).lower()}.\n"
                f"  Another server may be there; write another {field}, or 0 for a free port."
            ) from error
        return int(listener.getsockname()[1])


def workers_bind(config: ServerConfig, *, alone: bool) -> str:
    """The bind address of rank 0: as configured, or with a free port, unless it is `alone` and
    others must know the port."""
    if config.worker_bind_address != "auto":
        written = config.worker_bind_address
        if parse_port(written):
            return written
        host = parse_host(written)
        return tcp(host, free_port(host, 0, "worker_bind_address"))
    host = config.worker_bind_host
    if config.node_rank:
        # Rank 0 runs on another machine.
        return tcp(host, config.worker_bind_port)
    is_written = alone or "worker_bind_port" in config.model_fields_set
    port = config.worker_bind_port if is_written else 0
    return tcp(host, free_port(host, port, "worker_bind_port"))


def workers_address(config: ServerConfig, bind: str) -> str:
    """The address by which the scheduler reaches `bind`."""
    return tcp(config.engine_connect_host or near(parse_host(bind)), parse_port(bind))
