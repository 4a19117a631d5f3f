"""The engine as a process, between sockets."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from typing import Any, cast

import pytest

from penstock.config.server.config import ServerConfig
from penstock.core import env
from penstock.server.launch.job import ServerJob
from penstock.server.protocol.envelopes import FromScheduler
from penstock.server.protocol.requests import ListCheckpoints, OptimStep
from penstock.server.protocol.secret import new_secret
from penstock.server.protocol.worker_commands import (
    SaveCheckpointCommand,
    ToWorkers,
)
from penstock.server.protocol.zmq_channel import connecting, listening
from penstock.server.scheduler.__main__ import read_settings
from tests.server.engine_house import Client, a_pass, a_step
from tests.server.processes.test_launcher import is_alive
from tests.server.workers.standing_in import StandIn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def job_of(folder, workers_address):
    settings = {"model_path": "builtin:tiny-llama", "output_dir": str(folder), "enable_lora": True}
    config = ServerConfig.model_validate(settings)
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
    )


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_all_settings_that_the_engine_has_come_from_the_servers(tmp_path):
    job = job_of(tmp_path, "tcp://127.0.0.1:1")
    found = read_settings(job)
    assert found.storage_limit == 10 * 10**12
    assert found.output_dir == tmp_path
    # Those that are elsewhere stay.
    assert not found.ends_workers
    assert read_settings(replace(job, mode="auto")).ends_workers
    assert found.worker_max_restarts == 10
    assert not found.requires_keys
    assert read_settings(replace(job, requires_keys=True)).requires_keys
    # What the server's settings do not speak of is the engine's own.
    own = {
        "given_up",
        "ends_workers",
        "max_joined_samples",
        "status_interval",
        "base_names",
        "storage_limit",
        "output_dir",
        "requires_keys",
        "worker_max_restarts",
    }
    for name in set(vars(found)) - own:
        assert getattr(found, name) == getattr(job.config, name), name


class Around:
    """A client and workers, and how an engine between them is started."""

    def __init__(self, client, hearing, workers, command, environment):
        self.client = client
        self.hearing = hearing
        self.workers = workers
        self.command = command
        self.environment = environment

    async def end_client(self):
        self.hearing.cancel()
        await asyncio.wait({self.hearing})
        self.client.end.close()

    def start(self):
        return subprocess.Popen(self.command, env=self.environment)


@contextlib.asynccontextmanager
async def around(folder):
    known = {env.ENGINE_SECRET: new_secret(), env.WORKERS_SECRET: new_secret()}
    end = listening(ToWorkers, "tcp://127.0.0.1:*", known[env.WORKERS_SECRET])
    job = job_of(folder, end.address)
    workers = StandIn(end=end)
    api = connecting(FromScheduler, job.engine_address, known[env.ENGINE_SECRET])
    client = Client(cast(Any, api))
    tasks = [asyncio.create_task(each) for each in (client.listen(), workers.run(), workers.beat())]
    environment = {**os.environ, **known, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "penstock.server.scheduler", str(job.write())]
    try:
        yield Around(client, tasks[0], workers, command, environment)
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        api.close()
        end.close()


async def trained(client):
    """A model that has learnt 5 in one step."""
    await client.hello("api")
    await client.workers("ready")
    await client.begin()
    await client.do(a_pass("m", 5), 1)
    assert (await client.do(a_step(), 2)).metrics["learnt"] == 5


def test_a_killed_engine_is_followed_by_one_that_knows_what_it_knew(tmp_path):
    async def check():
        async with around(tmp_path) as here:
            client, engine = here.client, here.start()
            try:
                await trained(client)
                before = await client.do(ListCheckpoints())
                engine.kill()
                engine.wait()
                client.statuses.clear()
                engine = here.start()
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

    asyncio.run(check())


def test_an_engine_that_is_asked_to_end_saves_before_it_does(tmp_path):
    async def check():
        async with around(tmp_path) as here:
            engine = here.start()
            try:
                await trained(here.client)
                # As schedulers do: once for each process, and once more by its launcher.
                engine.terminate()
                await asyncio.sleep(0.2)
                engine.terminate()
                await here.end_client()
                assert await asyncio.to_thread(engine.wait, 30) == 0
            finally:
                engine.kill()
            kinds = [type(order) for order in here.workers.orders]
            assert kinds[-2:] == [OptimStep, SaveCheckpointCommand]
            assert not here.workers.has_left

    asyncio.run(check())


def test_an_engine_whose_launcher_is_gone_does_not_stay_to_save(tmp_path):
    async def check():
        async with around(tmp_path) as here:
            script = (
                "import subprocess, sys, time\n"
                "print(subprocess.Popen(sys.argv[1:], stdout=sys.stderr).pid, flush=True)\n"
                "time.sleep(600)"
            )
            launcher = subprocess.Popen(
                [sys.executable, "-S", "-c", script, *here.command],
                env=here.environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert launcher.stdout
            engine = int(await asyncio.to_thread(launcher.stdout.readline))
            try:
                await trained(here.client)
                here.workers.slowly = 60.0
                launcher.kill()
                launcher.wait()
                os.kill(engine, signal.SIGTERM)
                async with asyncio.timeout(10):
                    while is_alive(engine):
                        await asyncio.sleep(0.05)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(engine, signal.SIGKILL)
                launcher.stdout.close()

    asyncio.run(check())
