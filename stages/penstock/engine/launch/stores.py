"""Rendezvous stores: the key-value stores of process groups, and who can reach them.

Torch's stores do not authenticate clients. On one machine the store is therefore a file in a folder
that only its owner can access, without a socket. Over a network it listens at one address, on a
socket that is bound here: by default torch listens on every interface.
"""

import datetime
import socket
from pathlib import Path

from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from penstock.core import env
from penstock.core.process.rendezvous_endpoint import listening_address


def listening_store(
    address: str, port: int, *, timeout: datetime.timedelta, size: int | None = None
) -> tuple[TCPStore, int]:
    """A store server that listens at this address only, and its port (0: a free one).

    `address` "" means every address of this machine. Raises OSError if it cannot listen there.
    """
    is_dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual or ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family, dualstack_ipv6=is_dual)
    with listening:
        bound: int = listening.getsockname()[1]
        handle = listening.detach()
    # The store takes over the socket.
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
    """The name of the ranks' store: `file:FOLDER/ROUND` or `tcp:HOST:PORT/ROUND`."""
    # Each start of the ranks has its own round, because keys of an earlier one are stale.
    if isinstance(store, Path):
        return f"file:{store}/{round_number}"
    host, port = store
    return f"tcp:{host}:{port}/{round_number}"


def named_store(name: str, timeout: datetime.timedelta) -> Store:
    """The store that `store_name` names, as a rank uses it."""
    kind, _, location = name.partition(":")
    if kind == "file":
        store = FileStore(location)
        store.set_timeout(timeout)
        return store
    endpoint, _, round_number = location.rpartition("/")
    host, _, port = endpoint.rpartition(":")
    client = TCPStore(host, int(port), timeout=timeout, wait_for_workers=False)
    return PrefixStore(f"ranks/{round_number}", client)


def env_store(rank: int, address: str, port: int, timeout: datetime.timedelta) -> Store:
    """The store of ranks that torchrun or srun started, at the common `address`, where rank 0
    listens if no agent does."""
    if rank == 0 and not env.agent_serves_store():
        store, _ = listening_store(listening_address(address), port, timeout=timeout)
    else:
        store = TCPStore(address, port, timeout=timeout, wait_for_workers=False)
    # The agent's store outlives its ranks, and so do the addresses of stopped ones.
    return PrefixStore(f"restart_{env.restart_count()}", store)
