"""Addresses that are not on the public internet, and connections that lead to none of them."""

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from penstock.core.remote.answers import AnswerError

_EMBEDDED = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("::/96"))
"""IPv6 networks whose last 32 bits are an IPv4 address (RFC 6052, RFC 4291)."""


class PrivateAddressError(AnswerError, OSError):
    """A connection to an address that is not public."""


def is_public(address: str) -> bool:
    """Whether the IP address is on the public internet: not private, loopback, link-local, shared,
    multicast or reserved, in IPv6's forms of IPv4 addresses either."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if inner is None and any(ip in network for network in _EMBEDDED):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast


def require_public(addresses: Sequence[str], host: str) -> None:
    """Raise PrivateAddressError if one of the addresses of the host is not public."""
    for address in addresses:
        if not is_public(address):
            raise PrivateAddressError(
                f"{host} is {address}, a private, link-local or loopback address"
            )


def resolve(host: str) -> list[str]:
    """The addresses of a host; empty if its name cannot be resolved."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(info[4][0]) for info in infos]


def has_proxy(url: str) -> bool:
    """Whether the environment names a proxy for the URL."""
    # It imports HTTP and TLS, which a finished run does without.
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(url)
    return parts.scheme in getproxies() and not proxy_bypass(parts.netloc.rpartition("@")[2])


def public_socket(address: Sequence[Any]) -> socket.socket:
    """A socket for aiohttp's `socket_factory`: it gets the address that is connected to, whether a
    URL, a redirect or a name server gave it."""
    family, kind, protocol, _, target = address
    require_public([str(target[0])], "the server")
    return socket.socket(family, kind, protocol)
