"""Rendezvous of torchrun agents on several machines, without pickle.

Torch's own `c10d` rendezvous keeps its state as a pickle in a store that listens on every
interface, and unpickles what anyone has written there. Here the machines and their ranks are known
beforehand, so agents only agree on the round of (re)starts. One machine needs no socket; several
use a store on the first one, with string and integer values.
"""

import datetime
import sys
import time
from pathlib import Path

from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from penstock.core import env
from penstock.core.process.rendezvous_endpoint import listening_address, parse_endpoint, reachable
from penstock.engine.launch.stores import listening_store, store_name
from penstock.engine.launch.torchrun import RDZV_BACKEND

JOIN_SECONDS = 900.0
"""How long machines wait for each other: a container image may still be pulled."""
POLL_SECONDS = 0.1
COMPLETED, CLOSED = "completed", "closed"


class _Handler(RendezvousHandler):
    def __init__(self, run_id: str) -> None:
        self._run_id, self._round = run_id, 0

    def get_backend(self) -> str:
        return RDZV_BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        # Ranks use the store that `env.set_ranks_store` names.
        return False


class OneMachine(_Handler):
    """Rendezvous of a single machine. Ranks use a file store in `folder`, which must be private."""

    def __init__(self, folder: Path, run_id: str) -> None:
        super().__init__(run_id)
        self._folder = folder

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin the next round, with its own file."""
        self._round += 1
        # The ranks inherit the environment of this agent.
        env.set_ranks_store(store_name(self._folder, self._round))
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Does nothing: there is no other agent."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class Machines(_Handler):
    """Rendezvous of machine `number` among `count`; the first hosts the store at `host`:`port`.

    A round begins when all machines have requested it. A machine that requests the next round
    restarts the others: their agents stop their ranks and join.
    """

    def __init__(self, host: str, port: int, number: int, count: int, run_id: str) -> None:
        super().__init__(run_id)
        self._host, self._port, self._number, self._count = host, port, number, count
        self._connected: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all machines have joined the next round. Raises RendezvousTimeoutError if
        they do not, and RendezvousClosedError if one of them has given up."""
        store = self._store()
        completed = int(store.get(COMPLETED)) if store.check([COMPLETED]) else 0
        # A replacement machine joins at the round of the others.
        self._round = max(self._round, completed) + 1
        store.set(self._key(self._round, "called"), "1")
        store.set(self._key(self._round, self._number), "1")
        keys = [self._key(self._round, number) for number in range(self._count)]
        deadline = time.monotonic() + JOIN_SECONDS
        while not store.check(keys):
            if store.check([CLOSED]):
                raise RendezvousClosedError("another machine has ended this run")
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(
                    f"not all {self._count} machines have joined within {JOIN_SECONDS:.0f} s"
                )
            # Polled in Python, so that signals are handled.
            time.sleep(POLL_SECONDS)
        if self._number == 0:
            store.set(COMPLETED, str(self._round))
        env.set_ranks_store(store_name((self._host, self._port), self._round))
        return RendezvousInfo(
            # Keys of an earlier round are not those of this one.
            PrefixStore(f"agents/{self._round}", store),
            self._number,
            self._count,
            RendezvousStoreInfo(self._host, self._port),
        )

    def is_closed(self) -> bool:
        return self._store().check([CLOSED])

    def set_closed(self) -> None:
        self._store().set(CLOSED, "1")

    def num_nodes_waiting(self) -> int:
        """Whether a machine has requested the next round: 0 or 1."""
        # The agent polls it, and restarts its ranks when it is above 0.
        return int(self._store().check([self._key(self._round + 1, "called")]))

    def shutdown(self) -> bool:
        """End the run for machines that wait for this one."""
        try:
            self.set_closed()
        except (RuntimeError, OSError):
            return False  # The first machine is gone.
        return True

    @staticmethod
    def _key(round_number: int, entry: int | str) -> str:
        return f"round/{round_number}/{entry}"

    def _store(self) -> TCPStore:
        if self._connected is not None:
            return self._connected
        host, port, timeout = self._host, self._port, datetime.timedelta(seconds=JOIN_SECONDS)
        if self._number == 0:
            address = listening_address(host)
            self._connected, _ = listening_store(address, port, timeout=timeout)
            interface = address or f"every address of this machine ({host} is none of its own)"
            sys.stderr.write(
                f"launch: {self._count} machines rendezvous at {interface}, port {port}, without "
                "authentication: keep that network private\n"
            )
            return self._connected
        deadline = time.monotonic() + JOIN_SECONDS
        while not reachable(host, port):
            if time.monotonic() > deadline:
                seconds = f"{JOIN_SECONDS:.0f} s"
                raise RendezvousTimeoutError(f"{host}:{port} did not answer in {seconds}")
            time.sleep(POLL_SECONDS)
        self._connected = TCPStore(host, port, timeout=timeout, wait_for_workers=False)
        return self._connected


def create_handler(parameters: RendezvousParameters, folder: Path) -> RendezvousHandler:
    """The handler for torchrun's `--rdzv-backend`; `--rdzv-conf rank=N` is this machine's rank."""
    if parameters.max_nodes == 1:
        return OneMachine(folder, parameters.run_id)
    host, port = parse_endpoint(parameters.endpoint)
    number = int(parameters.get("rank", 0))
    return Machines(host, port, number, parameters.max_nodes, parameters.run_id)
