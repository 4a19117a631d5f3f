"""An engine between a client and workers, all in one process."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.server.protocol.codec import PeerLostError
from penstock.server.protocol.envelopes import (
    Cancel,
    Failure,
    FromScheduler,
    Hello,
    Request,
    Response,
    Status,
    ToScheduler,
)
from penstock.server.protocol.requests import CreateModel, CreateSession, ForwardBackward, OptimStep
from penstock.server.protocol.results import ServedModel
from penstock.server.protocol.types import AdamParams, Array, Datum, LoraConfig, SamplingParams
from penstock.server.protocol.worker_commands import FromWorkers
from penstock.server.scheduler.scheduler import Scheduler
from penstock.server.scheduler.settings import SchedulerSettings
from tests.server.in_process_channel import MemoryEnd, memory_pair
from tests.server.workers.standing_in import SERVED, VOCABULARY, Dies, StandIn, lives


class Client:
    """One API process: asks by their ids, and what became of them."""

    def __init__(self, end: MemoryEnd[Any, Any], owner: str = "one") -> None:
        self.end = end
        self.owner = owner
        self.statuses: list[Status] = []
        self._ids = itertools.count(1)
        self._ended: dict[str, asyncio.Future[Any]] = {}

    async def listen(self) -> None:
        while True:
            try:
                message = await self.end.receive()
            except PeerLostError:
                continue
            if isinstance(message, Status):
                self.statuses.append(message)
            else:
                future = self._future(message.id)
                # A task that was cancelled no longer waits for its answer.
                if not future.done():
                    answer = message.result if isinstance(message, Response) else message
                    future.set_result(answer)

    async def ask(
        self, work: Any, seq: int | None = None, *, owner: str | None = None, name: str = ""
    ) -> "asyncio.Future[Any]":
        """Sent; what it will end with: a result, or a Failure."""
        name = name or f"ask-{next(self._ids)}"
        future = self._future(name)
        await self.end.send(Request(id=name, owner=owner or self.owner, operation=work, seq=seq))
        return future

    async def do(self, work: Any, seq: int | None = None, *, owner: str | None = None) -> Any:
        """Its result. Raises AssertionError with what it failed of."""
        ended = await self.end_of(work, seq, owner=owner)
        assert not isinstance(ended, Failure), ended
        return ended

    async def fails(
        self, work: Any, seq: int | None = None, *, owner: str | None = None
    ) -> Failure:
        """What it failed of."""
        ended = await self.end_of(work, seq, owner=owner)
        assert isinstance(ended, Failure), ended
        return ended

    async def end_of(self, work: Any, seq: int | None = None, *, owner: str | None = None) -> Any:
        return await asyncio.wait_for(await self.ask(work, seq, owner=owner), 20)

    async def cancel(self, name: str) -> None:
        await self.end.send(Cancel(id=name))

    async def hello(self, instance: str) -> None:
        await self.end.send(Hello(instance=instance))

    async def begin(self, model: str = "m", rank: int = 8, session: str = "s") -> None:
        """Make a session, and a model in it."""
        await self.do(CreateSession(session=session))
        await self.do(
            CreateModel(session=session, model=model, base_model=None, lora=LoraConfig(rank=rank))
        )

    async def workers(self, state: str) -> None:
        """Wait until that is said of the workers."""
        async with asyncio.timeout(20):
            while not self.statuses or self.statuses[-1].workers != state:
                await asyncio.sleep(0.01)

    def _future(self, name: str) -> "asyncio.Future[Any]":
        if name not in self._ended:
            self._ended[name] = asyncio.get_running_loop().create_future()
        return self._ended[name]


class House:
    """A client, an engine, and workers."""

    def __init__(self, folder: Path, served: ServedModel, given: dict[str, Any]) -> None:
        defaults: dict[str, Any] = {
            "output_dir": folder,
            "status_interval": 0.02,
            "sequence_gap_timeout": 0.3,
            "sample_packing_sequence_len": 32,
            "worker_max_retries": 0,
        }
        self.settings = SchedulerSettings(**(defaults | given))
        self.served = served
        self.tasks: list[asyncio.Task[None]] = []
        self.engine_tasks: list[asyncio.Task[None]] = []
        self.engine: Scheduler
        self.client: Client
        self.workers: StandIn
        self._to_workers: MemoryEnd[Any, Any]
        self._to_api: MemoryEnd[Any, Any]

    def start_engine(self) -> None:
        """With a client of its own; the workers are those that there are."""
        api, self._to_api = memory_pair(ToScheduler, FromScheduler)
        self._to_workers = MemoryEnd(FromWorkers, "connects")
        self.client = Client(api)
        self.engine = Scheduler(self.settings, self._to_api, self._to_workers)
        self.engine_tasks = [asyncio.create_task(self.engine.run())]
        self.tasks.append(asyncio.create_task(self.client.listen()))

    def start_workers(self, dies: Dies = lives) -> StandIn:
        """Others, in the place of those before."""
        self.workers = StandIn(self.served)
        self.workers.dies = dies
        self.meet()
        self.tasks.append(asyncio.create_task(self.workers.run()))
        self.tasks.append(asyncio.create_task(self.workers.beat()))
        return self.workers

    def meet(self) -> None:
        """The engine and the workers that there are can hear each other."""
        self._to_workers.join(self.workers.end)

    async def kill_engine(self) -> None:
        self._to_workers.drop()
        await _end(self.engine_tasks)

    async def stop_engine(self) -> None:
        """In order; what it still says is heard."""
        self.engine.stop()
        await asyncio.wait_for(self.engine_tasks[0], 20)
        self._to_workers.drop()

    async def start_again(self) -> None:
        """Another engine process, and other workers."""
        self.start_engine()
        self.start_workers()
        await self.client.workers("ready")

    async def restart_engine(self) -> None:
        """Another engine process, and workers that live on."""
        await self.kill_engine()
        self.start_engine()
        self.meet()
        await self.client.workers("ready")

    async def close(self) -> None:
        await _end([*self.engine_tasks, *self.tasks])


@contextlib.asynccontextmanager
async def house(folder: Path, served: ServedModel = SERVED, **given: Any) -> AsyncIterator[House]:
    """All of them, ready to be asked."""
    made = House(folder, served, given)
    made.start_engine()
    made.start_workers()
    try:
        await made.client.workers("ready")
        yield made
    finally:
        await made.close()


async def _end(tasks: list["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended


def a_pass(
    model: str = "m", *lengths: int, forward_only: bool = False, **given: Any
) -> ForwardBackward:
    """Over samples of so many tokens."""
    data = tuple(a_datum(length) for length in lengths or (4,))
    return ForwardBackward(
        model=model,
        data=data,
        loss=given.pop("loss", "cross_entropy"),
        forward_only=forward_only,
        **given,
    )


def a_datum(length: int) -> Datum:
    tokens = Array.of(np.arange(length) % VOCABULARY, "int32")
    return Datum(tokens=tokens, inputs={"target_tokens": Array.of(np.arange(length), "int64")})


def a_step(model: str = "m") -> OptimStep:
    return OptimStep(model=model, adam=AdamParams())


def sampling() -> SamplingParams:
    return SamplingParams(max_tokens=1)
