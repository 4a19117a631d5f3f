"""Inference servers are asked how many ranks they have when they are added, and nobody is told the
keys that they ask for."""

import asyncio
import contextlib
import http.server
import json
import stat
import threading

import pytest

from penstock.server.protocol.requests import (
    AddEndpoint,
    ListEndpoints,
    OptimStep,
    RemoveEndpoint,
    SyncWeights,
)
from penstock.server.protocol.types import AdamParams, Endpoint, Secret
from penstock.server.protocol.worker_commands import WeightSyncCommand
from penstock.server.scheduler import inference_endpoints
from penstock.server.scheduler.state_store import EndpointRecord
from penstock.server.weight_sync.errors import SyncError
from penstock.server.weight_sync.sglang_client import InferenceServer
from tests.server.engine_house import a_pass, house

KEY = "tml-of-theirs"


@contextlib.contextmanager
def telling(told=(), **routes):
    """A server that says these of itself, at the routes that have these names, to who knows KEY;
    its port. `told`: the paths of what it was told."""

    class Front(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            said = routes.get(self.path[1:])
            knows = self.headers.get("authorization") == f"Bearer {KEY}"
            self.send_response(401 if not knows else 404 if said is None else 200)
            self.end_headers()
            text = said if isinstance(said, str) else json.dumps(said)
            self.wfile.write(text.encode() if knows else self.headers.as_bytes())

        def do_POST(self):
            knows = self.headers.get("authorization") == f"Bearer {KEY}"
            if knows:
                told.append(self.path)
            self.send_response(200 if knows else 401)
            self.end_headers()
            self.wfile.write(b"{}" if knows else self.headers.as_bytes())

        def log_message(self, format, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Front) as server:
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def adding(port, key: str | None = KEY, **more):
    endpoint = Endpoint(host="127.0.0.1", port=port, **more)
    secret = Secret(text=key) if key else None
    return AddEndpoint(endpoint=endpoint, is_sized=bool(more), api_key=secret)


@pytest.mark.parametrize(
    ("routes", "size"),
    [
        ({"server_info": {"tp_size": 4, "dp_size": 1, "api_key": "x"}}, 4),
        ({"get_server_info": {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}}, 8),
        ({}, 1),
        ({"server_info": "no JSON"}, 1),
        ({"server_info": [4]}, 1),
        ({"server_info": {"tp_size": "4"}}, 1),
        ({"server_info": {"tp_size": 0}}, 1),
    ],
    ids=str,
)
def test_a_server_has_as_many_ranks_as_it_says_where_its_client_does_not(tmp_path, routes, size):
    async def check():
        async with house(tmp_path) as here:
            with telling(**routes) as port:
                told = await here.client.do(adding(port))
                assert [each.world_size for each in told.endpoints] == [size]
                # It is said again, and counts where the server says nothing.
                told = await here.client.do(adding(port, world_size=size))
                assert [each.world_size for each in told.endpoints] == [size]

    asyncio.run(check())


def test_a_server_that_is_not_what_its_client_says_is_not_added(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            with telling(server_info={"tp_size": 4}) as port:
                failed = await here.client.fails(adding(port, world_size=2))
                assert (failed.code, failed.category) == ("invalid", "user")
                assert f"127.0.0.1:{port}: it says that its tp_size is 4" in failed.error
                failed = await here.client.fails(adding(port, None))
                assert (failed.code, failed.category) == ("invalid", "user")
                assert "HTTP 401" in failed.error
                assert "api_key" in failed.error
            failed = await here.client.fails(adding(port, "no\nkey"))
            assert "no header" in failed.error
            assert (await here.client.do(ListEndpoints())).endpoints == ()

    asyncio.run(check())


def test_a_key_reaches_the_workers_and_outlives_the_engine_and_nobody_else_reads_it(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            with telling() as port:
                told = await here.client.do(adding(port))
            await here.client.do(adding(1, None, pool="b"))
            await here.restart_engine()
            await here.client.do(SyncWeights(model="m"))
            [push] = [
                order for order in here.workers.orders if isinstance(order, WeightSyncCommand)
            ]
            assert push.api_keys == (Secret(text=KEY), None)
            assert KEY not in f"{told} {push} {adding(port)}"

    asyncio.run(check())
    file = tmp_path / "server" / "endpoints.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert KEY not in repr(EndpointRecord(owner="o", host="a", port=1, api_key=KEY))


def test_a_server_is_known_to_the_owner_who_added_it(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            with telling() as port:
                await here.client.do(adding(port), owner="two")
                await here.client.do(adding(port))
                await here.client.do(RemoveEndpoint(host="127.0.0.1", port=port))
            assert (await here.client.do(ListEndpoints())).endpoints == ()
            theirs = (await here.client.do(ListEndpoints(), owner="two")).endpoints
            assert [each.port for each in theirs] == [port]
            failed = await here.client.fails(RemoveEndpoint(host="127.0.0.1", port=port))
            assert failed.code == "not_found"
            failed = await here.client.fails(SyncWeights(model="m"))
            assert "no inference endpoints" in failed.error

    asyncio.run(check())


def test_servers_generate_again_when_the_workers_die_that_paused_them(tmp_path):
    def dies(order):
        return "before" if isinstance(order, WeightSyncCommand) else None

    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            here.workers.dies = dies
            told = []
            with telling(told) as port:
                await here.client.do(adding(port))
                failed = await here.client.fails(SyncWeights(model="m"))
                assert failed.code == "lost"
                async with asyncio.timeout(10):
                    while len(told) < 2:
                        await asyncio.sleep(0.01)
            assert told == ["/continue_generation", "/destroy_weights_update_group"]

    asyncio.run(check())


def test_what_a_server_says_of_a_key_is_told_without_it():
    with telling() as port:
        server = InferenceServer(Endpoint(host="127.0.0.1", port=port), Secret(text="tml-wrong"))
        # It may be the key for weights, of which this route knows nothing.
        assert server.sizes(5.0) is None
        with pytest.raises(SyncError, match="HTTP 401") as caught:
            server.post("/continue_generation", {}, step="continue", seconds=5.0)
    assert caught.value.category == "user"
    assert "admin" in str(caught.value)
    assert "tml-wrong" not in str(caught.value)


def test_an_owner_has_so_many_inference_servers_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(inference_endpoints, "MAX_OWNER_ENDPOINTS", 3)

    async def check():
        async with house(tmp_path) as here:
            asked = [await here.client.ask(adding(port, None, pool="p")) for port in (1, 2, 3, 4)]
            refused = await asked[3]
            assert (refused.category, refused.code) == ("user", "busy")
            for each in asked[:3]:
                await each
            # One that is known is named again, and others have their own.
            await here.client.do(adding(3, None, pool="q"))
            assert (await here.client.fails(adding(4, None, pool="p"))).code == "busy"
            await here.client.do(adding(4, None, pool="p"), owner="two")

    asyncio.run(check())


def test_what_a_server_answers_is_for_the_log_and_not_for_the_client(caplog):
    told = "a secret of another service on this machine"

    class Front(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(500)
            self.end_headers()
            self.wfile.write(told.encode())

        def log_message(self, format, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Front) as server:
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        endpoint = Endpoint(host="127.0.0.1", port=server.server_address[1])
        with pytest.raises(SyncError, match="HTTP 500") as caught:
            InferenceServer(endpoint).post("/x", {}, step="pause", seconds=5)
        server.shutdown()
    assert told not in str(caught.value)
    assert told in caplog.text


@pytest.mark.parametrize("is_there", [True, False])
def test_weights_are_sent_after_each_step_where_that_is_written(tmp_path, is_there):
    sync = SyncWeights(model="m", pools=("default", "m"))

    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()

            async def stepped(sync):
                await here.client.do(a_pass())
                done = await here.client.do(OptimStep(model="m", adam=AdamParams(), sync=sync))
                pushes = [
                    order for order in here.workers.orders if isinstance(order, WeightSyncCommand)
                ]
                return done.metrics.get("weights_synced"), len(pushes)

            await here.client.do(adding(1, None, pool="other"))
            assert await stepped(sync) == (None, 0)
            await here.client.do(adding(2, None, pool="m"))
            assert await stepped(None) == (None, 0)
            here.workers.fails = lambda order: isinstance(order, WeightSyncCommand) and not is_there
            # A sync that fails is no step that did: nobody must take it again.
            assert await stepped(sync) == (float(is_there), 1)
            [push] = [
                order for order in here.workers.orders if isinstance(order, WeightSyncCommand)
            ]
            assert [each.port for each in push.endpoints] == [2]

    asyncio.run(check())
