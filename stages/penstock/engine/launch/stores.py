"""The key-value stores at which processes find each other, and who can reach them.

Torch's stores authenticate nobody. On one machine a store is therefore a file in a folder that its
owner alone may enter, and no socket. Over a network it listens at one address, on a socket that is
bound here: torch by itself listens on every interface.
"""

import datetime
import socket
from pathlib import Path

from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from penstock.core import env
from penstock.core.process.rendezvous import listening_address


def listening_store(
    address: str, port: int, *, timeout: datetime.timedelta, size: int | None = None
) -> tuple[TCPStore, int]:
    """The server of a store that listens at this address alone, and its port (0: a free one).

    `address` "" means every address of this machine. Raises OSError where one cannot listen there.
    """
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, port), family=family)
    elif socket.has_dualstack_ipv6():
        listening = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listening = socket.create_server(("", port))
    with listening:
        bound: int = listening.getsockname()[1]
        handle = listening.detach()
    # The store takes the socket over.
    server = TCPStore(
        address or "localhost",
        bound,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=handle,
    )
    return server, bound


def store_name(store: Path | tuple[str, int], round_number: int) -> str:
    """How ranks are told of their store: `file:FOLDER/ROUND` or `tcp:HOST:PORT/ROUND`.

    Each start of the ranks has a round of its own, for what an earlier one left behind is stale.
    """
    if isinstance(store, Path):
        return f"file:{store}/{round_number}"
    host, port = store
    return f"tcp:{host}:{port}/{round_number}"


def named_store(name: str, timeout: datetime.timedelta) -> Store:
    """The store that `store_name` names, as a rank uses it."""
    kind, _, place = name.partition(":")
    if kind == "file":
        store = FileStore(place)
        store.set_timeout(timeout)
        return store
    endpoint, _, round_number = place.rpartition("/")
    host, _, port = endpoint.rpartition(":")
    client = TCPStore(host, int(port), timeout=timeout, wait_for_workers=False)
    return PrefixStore(f"ranks/{round_number}", client)


def env_store(rank: int, address: str, port: int, timeout: datetime.timedelta) -> Store:
    """The store of ranks that torchrun or srun started, at the `address` that all were given.

    Where no agent listens there, rank 0 does.
    """
    if rank == 0 and not env.agent_serves_store():
        store, _ = listening_store(listening_address(address), port, timeout=timeout)
    else:
        store = TCPStore(address, port, timeout=timeout, wait_for_workers=False)
    # The agent's store outlives its ranks, and with it the addresses of those that are gone.
    return PrefixStore(f"restart_{env.restart_count()}", store)
