"""How machines agree on a start of the ranks: without a pickle, at one address, again and again."""

import base64
import os
import pickle
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters

from penstock.core.env import RANKS_STORE
from penstock.core.process import rendezvous_endpoint
from penstock.engine.launch.rendezvous import create_handler
from tests.sockets import Payload, attack, listening


@pytest.fixture
def port():
    """One of loopback that is free."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture
def machine(port, tmp_path, monkeypatch):
    """A machine of two by its number; what its ranks are told goes nowhere."""
    monkeypatch.setenv(RANKS_STORE, "")

    def made(number: int):
        endpoint = f"127.0.0.1:{port}"
        told = RendezvousParameters("penstock", endpoint, "run", 2, 2, rank=str(number))
        return create_handler(told, tmp_path)

    return made


def together(*machines):
    with ThreadPoolExecutor(len(machines)) as threads:
        return [each.result(60) for each in [threads.submit(m.next_rendezvous) for m in machines]]


def test_machines_meet_again_when_one_asks_and_one_that_is_replaced_finds_the_round(machine, port):
    first, second = machine(0), machine(1)
    found = together(first, second)
    assert [(one.rank, one.world_size) for one in found] == [(0, 2), (1, 2)]
    found[0].store.set("from", "first")
    assert found[1].store.get("from") == b"first"
    assert os.environ[RANKS_STORE] == f"tcp:127.0.0.1:{port}/1"
    assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0
    replaced = machine(1)  # the second machine was lost, with all that it knew
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(replaced.next_rendezvous)
        while not first.num_nodes_waiting():
            assert not waiting.done()
        again = [first.next_rendezvous(), waiting.result(60)]
    assert os.environ[RANKS_STORE] == f"tcp:127.0.0.1:{port}/2"
    assert not again[1].store.check(["from"]), "what an earlier round left is not found"
    assert replaced.shutdown()
    with pytest.raises(RendezvousClosedError):
        first.next_rendezvous()


@pytest.mark.slow
def test_no_pickle_in_the_store_of_machines_is_read(machine, port, tmp_path):
    first, second = machine(0), machine(1)
    together(first, second)
    [mine] = [one for one in listening(os.getpid()) if one.port == port]
    assert mine.address == "127.0.0.1", "it listens where it was told to alone"
    ran = tmp_path / "payload-ran"
    value = base64.b64encode(pickle.dumps(Payload(ran)))
    assert first._store().set("round/3/called", value) is None
    assert attack(port, ran), "over a network, whoever reaches it may write to it"
    for _ in range(2):
        with pytest.raises((ValueError, RendezvousClosedError)):
            second.next_rendezvous()
    assert first.num_nodes_waiting() in (0, 1)
    assert not ran.exists()


def test_one_machine_needs_no_socket(tmp_path, monkeypatch):
    monkeypatch.setenv(RANKS_STORE, "")
    before = listening(os.getpid())
    alone = create_handler(RendezvousParameters("penstock", "", "run", 1, 1), tmp_path)
    for number in (1, 2):
        assert alone.next_rendezvous().world_size == 1
        assert os.environ[RANKS_STORE] == f"file:{tmp_path}/{number}"
    assert listening(os.getpid()) == before


@pytest.mark.parametrize(
    ("host", "stands_for", "address"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("node0", "127.0.1.1", ""),  # its own name for itself, which others know otherwise
        ("node0", "203.0.113.7", ""),  # translated on the way here
        ("::1", "::1", "::1"),
    ],
)
def test_it_listens_at_the_address_that_is_named_where_that_is_its_own(
    monkeypatch, host, stands_for, address
):
    family = socket.AF_INET6 if ":" in stands_for else socket.AF_INET
    found = [(family, socket.SOCK_STREAM, 6, "", (stands_for, 0))]
    monkeypatch.setattr(rendezvous_endpoint.socket, "getaddrinfo", lambda *_, **__: found)
    assert rendezvous_endpoint.listening_address(host) == address
