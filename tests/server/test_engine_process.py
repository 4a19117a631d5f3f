"""The engine as a process, between sockets."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from typing import Any, cast

import pytest

from penstock.config.server import ServerConfig
from penstock.core import env
from penstock.server.job import ServerJob
from penstock.server.orchestrator.__main__ import settings_of
from penstock.server.protocol.asks import FromEngine
from penstock.server.protocol.commands import ToWorkers
from penstock.server.protocol.secret import new_secret
from penstock.server.protocol.works import ListCheckpoints
from penstock.server.protocol.zmq import connecting, listening
from tests.server.engine_house import Client, a_pass, a_step
from tests.server.standing_in import StandIn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def job_of(folder, workers_address):
    config = ServerConfig(model_path="builtin:tiny-llama", output_dir=str(folder), enable_lora=True)
    engine = f"tcp://127.0.0.1:{_free_port()}"
    return ServerJob(
        config=config,
        mode="connect",
        output_dir=folder,
        config_path="builtin:tiny-llama",
        weights=None,
        tokenizer="builtin:bytes",
        api_host="127.0.0.1",
        api_port=1,
        engine_address=engine,
        workers_bind=workers_address,
        workers_address=workers_address,
        launch="x",
    )


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_all_settings_that_the_engine_has_come_from_the_servers(tmp_path):
    job = job_of(tmp_path, "tcp://127.0.0.1:1")
    found = settings_of(job)
    assert found.storage_limit == 10 * 10**12
    assert found.output_dir == tmp_path
    # What the server's settings do not speak of is the engine's own.
    own = {
        "given_up",
        "max_joined_samples",
        "status_interval",
        "base_names",
        "storage_limit",
        "output_dir",
    }
    for name in set(vars(found)) - own:
        assert getattr(found, name) == getattr(job.config, name), name


def test_a_killed_engine_is_followed_by_one_that_knows_what_it_knew(tmp_path):
    known = {env.ENGINE_SECRET: new_secret(), env.WORKERS_SECRET: new_secret()}

    def started(path):
        command = [sys.executable, "-m", "penstock.server.orchestrator", str(path)]
        return subprocess.Popen(command, env={**os.environ, **known, "PYTHONSAFEPATH": "1"})

    async def check():
        end = listening(ToWorkers, "tcp://127.0.0.1:*", known[env.WORKERS_SECRET])
        job = job_of(tmp_path, end.address)
        path = job.write()
        workers = StandIn(end=end)
        api = connecting(FromEngine, job.engine_address, known[env.ENGINE_SECRET])
        client = Client(cast(Any, api))
        tasks = [
            asyncio.create_task(each) for each in (workers.run(), workers.beat(), client.listen())
        ]
        engine = started(path)
        try:
            await client.hello("api")
            await client.workers("ready")
            await client.begin()
            await client.do(a_pass("m", 5), 1)
            assert (await client.do(a_step(), 2)).metrics["learnt"] == 5
            before = await client.do(ListCheckpoints())
            engine.kill()
            engine.wait()
            client.statuses.clear()
            engine = started(path)
            while not client.statuses:
                await client.hello("api")
                await asyncio.sleep(0.1)
            await client.workers("ready")
            assert await client.do(ListCheckpoints()) == before
            await client.do(a_pass("m", 1), 3)
            assert (await client.do(a_step(), 4)).metrics["learnt"] == 6
        finally:
            engine.kill()
            engine.wait()
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            api.close()
            end.close()

    asyncio.run(check())
