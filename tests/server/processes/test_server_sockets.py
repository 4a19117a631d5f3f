"""What a training server listens at: loopback, and nothing there leads to a pickle that is read."""

import time

import httpx
import pytest

from tests.server.serving import Server, write_model
from tests.sockets import Observer

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(280)]


def test_a_server_of_two_ranks_listens_on_loopback_and_survives_every_payload(tmp_path):
    server = Server(
        tmp_path / "served",
        write_model(tmp_path / "model"),
        nproc_per_node=2,
        data_parallel_mode="fsdp2",
        data_parallel_shard_size=2,
    )
    ran = tmp_path / "payload-ran"
    try:
        server.start()
        assert server.pid
        with Observer(server.pid, ran) as observer:
            deadline = time.monotonic() + 60
            while not observer.seen and time.monotonic() < deadline:
                time.sleep(0.1)
        processes = server.processes()
        assert {"api", "engine", "rank 0", "rank 1"} <= processes.keys()
        assert processes["rank 1"] in {one.pid for one in observer.seen}
        assert observer.reachable_by_others == set()
        assert observer.stores == []
        assert not ran.exists()
        assert httpx.get(f"{server.url}/health", timeout=30).json()["workers"] == "ready"
    finally:
        server.stop()
