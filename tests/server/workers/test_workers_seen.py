"""The workers as the engine sees them: what is meant for some is never heard by the next."""

import asyncio

import pytest

from penstock.server.protocol.requests import ZeroGrad
from penstock.server.protocol.results import Done
from penstock.server.protocol.worker_commands import (
    CommandFailure,
    FromWorkers,
    Ready,
    ToWorkers,
)
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.settings import SchedulerSettings
from penstock.server.scheduler.worker_client import WorkerClient
from tests.server.in_process_channel import MemoryEnd
from tests.server.workers.standing_in import SERVED


def test_workers_that_come_after_some_that_failed_and_ended_are_not_told_to_leave(tmp_path):
    async def check():
        ours = MemoryEnd(FromWorkers, "connects")
        first, second = (MemoryEnd(ToWorkers, "listens") for _ in range(2))
        workers = WorkerClient(ours, SchedulerSettings(output_dir=tmp_path), lambda: None)
        ours.join(first)
        tasks = [
            asyncio.create_task(each) for each in (workers.receive_loop(), workers.send_loop())
        ]
        await first.send(Ready(instance="first", served=SERVED, models=()))
        async with asyncio.timeout(5):
            while workers.ready is None:
                await asyncio.sleep(0)
            forgetting = asyncio.create_task(workers.run(ZeroGrad(model="m"), Done))
            command = await first.receive()
            fault = CommandFailure(
                id=command.id,
                error="broken",
                category="server",
                code="internal",
                needs_restart=True,
            )
            # That they have ended is heard of with the word that they will.
            await first.send(fault)
            first.drop()
            with pytest.raises(RequestError, match="broken"):
                await forgetting
        ours.join(second)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(second.receive(), 0.2)
        assert workers.consecutive_losses == 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(check())
