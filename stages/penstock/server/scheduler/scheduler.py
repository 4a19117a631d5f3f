"""The scheduler: receives requests from the API, runs them in order, and replies.

Runs in one event loop, which makes all state changes. Requests that need workers run one at a time;
all others run immediately.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, cast

from penstock.server.protocol.codec import Channel, FrameError, PeerLostError
from penstock.server.protocol.envelopes import (
    Answer,
    Cancel,
    Failure,
    FromEngine,
    Hello,
    Request,
    Status,
    ToEngine,
)
from penstock.server.protocol.requests import AddEndpoint, CreateModel, Immediate, Ordered, Sample
from penstock.server.protocol.results import Result, Served
from penstock.server.protocol.worker_commands import FromWorkers, Ready, ToWorkers
from penstock.server.scheduler.admission import Admission
from penstock.server.scheduler.checkpoint_catalog import Checkpoints
from penstock.server.scheduler.errors import (
    OperationTimeoutError,
    RequestError,
    WorkersLostError,
    internal_error,
)
from penstock.server.scheduler.expiry import Expiry
from penstock.server.scheduler.immediate_requests import ImmediateRequests
from penstock.server.scheduler.models import Models
from penstock.server.scheduler.queue import Outcome, Queue, Task, told
from penstock.server.scheduler.recovery import Recovery
from penstock.server.scheduler.sampling import Sampling
from penstock.server.scheduler.save_checkpoint import Saving
from penstock.server.scheduler.sessions import Sessions
from penstock.server.scheduler.settings import EngineSettings
from penstock.server.scheduler.shutdown import Stopping
from penstock.server.scheduler.state_store import (
    QueueState,
    Registry,
    ShutdownState,
    build_model_record,
)
from penstock.server.scheduler.storage import Storage, TrashCollector
from penstock.server.scheduler.training import Trained, Training
from penstock.server.scheduler.worker_client import State, Workers
from penstock.server.weight_sync.allowed_hosts import allowed_hosts

LOG = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""Seconds between checks for requests that wait for a missing sequence number."""

NEWS_SECONDS = 0.05
"""Minimum seconds between status messages."""


class Scheduler:
    """The scheduler, between the API channel and the worker channel."""

    def __init__(
        self,
        settings: EngineSettings,
        api: Channel[FromEngine, ToEngine],
        workers: Channel[ToWorkers, FromWorkers],
    ) -> None:
        """Restore the state of an earlier process. Raises RegistryError if it cannot be read."""
        self._settings = settings
        self._api = api
        self._wake = asyncio.Event()
        self._outbox: asyncio.Queue[FromEngine] = asyncio.Queue()
        self._news = asyncio.Event()
        self._said: State | None = None
        """The last reported state of the workers."""
        self._api_instance: str | None = None
        self._agreed: Ready | None = None
        """The workers whose models are restored."""
        hosts = allowed_hosts(settings.sync_allowed_hosts, requires_keys=settings.requires_keys)
        storage, discarding = Storage(settings.output_dir, settings.storage_limit), TrashCollector()
        registry = Registry(storage.root)
        self._registry = registry
        self._queue = Queue(settings.sequence_gap_timeout)
        self._workers = Workers(workers, settings, self._changed)
        self._sessions = Sessions(registry, settings)
        self._models = Models(registry)
        checkpoints = Checkpoints(registry, storage)
        self._recovery = Recovery(self._workers, registry, self._models, checkpoints)
        saving = Saving(self._workers, registry, storage, self._models, discarding)
        self._training = Training(
            settings,
            self._workers,
            registry,
            self._sessions,
            self._models,
            checkpoints,
            saving,
            hosts,
        )
        self._sampling = Sampling(self._workers, storage, self._sessions, checkpoints)
        self._admission = Admission(
            self._queue,
            self._sessions,
            self._models,
            self._served,
            self._base_names,
            settings,
        )
        self._retiring = Expiry(
            settings, self._queue, self._sessions, self._models, checkpoints, discarding.discard
        )
        self._told = ImmediateRequests(
            registry,
            self._sessions,
            self._models,
            checkpoints,
            served=self._served_now,
            base_names=self._base_names,
            pending=self._queue.pending,
            discard=discarding.discard,
            end=self._retiring.end,
            allowed_hosts=hosts,
        )
        self._stopping = Stopping(
            settings, self._queue, self._workers, self._models, self._training
        )
        self._go_on()

    async def run(self) -> None:
        """Serve until cancelled, or until stopped and everything is saved that could be."""
        serving: tuple[Coroutine[Any, Any, None], ...] = (
            self._hear(),
            self._speak(),
            self._workers.hear(),
            self._workers.speak(),
            self._workers.greet(),
            self._look(),
            self._tell(),
        )
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(each) for each in serving]
            await self._stopping.end(tasks.create_task(self._work()), self._leave)
            for each in begun:
                each.cancel()

    def stop(self) -> None:
        """Request an orderly end of `run`."""
        self._stopping.ask()
        self._wake.set()

    def _go_on(self) -> None:
        """Continue from where the previous process stopped or died."""
        left = self._registry.take_left()
        self._admission.untouched.update(left.untouched)
        for record in self._models.open():
            self._queue.restore(record.model, left.lanes.get(record.model, QueueState()))

    def _leave(self) -> None:
        left = ShutdownState(lanes=self._queue.left(), untouched=self._admission.untouched)
        try:
            self._registry.leave(left)
        except OSError as error:
            LOG.warning("what was done cannot be told to the next process: %s", error)

    # Messages from and to the API.

    async def _hear(self) -> None:
        while True:
            try:
                message = await self._api.receive()
            except PeerLostError:
                self._stopping.lose_api()
                continue
            match message:
                case Hello():
                    self._stopping.find_api()
                    self._greeted(message)
                case Request():
                    self._asked(message)
                case Cancel():
                    self._cancelled(message)

    async def _speak(self) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await self._api.send(message)
            except FrameError as error:
                if isinstance(message, Answer | Failure):
                    failure = RequestError("internal", f"the answer cannot be sent: {error}")
                    await self._api.send(failure.failure(message.id))

    def _greeted(self, hello: Hello) -> None:
        if self._api_instance not in (None, hello.instance):
            dropped = self._queue.abandon()
            for errand in dropped:
                self._admission.ended(errand)
            LOG.info("another API process; %d works are not begun any more", len(dropped))
        self._api_instance = hello.instance
        self._say()

    def _asked(self, ask: Request) -> None:
        try:
            if isinstance(ask.work, Ordered | Sample):
                self._put(ask, ask.work)
            elif isinstance(ask.work, AddEndpoint):
                self._told.add(ask.work, ask.owner, partial(self._end_ask, ask.id))
            else:
                self._end_ask(ask.id, self._told.do(cast(Immediate, ask.work), ask.owner))
        except RequestError as error:
            self._end_ask(ask.id, error)
        except Exception as error:  # noqa: BLE001 - a failed request must not stop others
            self._end_ask(ask.id, internal_error(error))

    def _put(self, ask: Request, work: Ordered | Sample) -> None:
        if self._workers.state == "failed":
            raise RequestError("unavailable", self._workers.reason)
        outcome = self._admission.put(ask, work)
        if outcome is not None:
            self._end_ask(ask.id, outcome)
        self._changed()

    def _cancelled(self, cancel: Cancel) -> None:
        outcome = RequestError("cancelled", "it was cancelled before it began")
        if self._queue.is_waited_for(cancel.id):
            errand = self._queue.cancel(cancel.id, outcome)
            if errand is not None:
                self._admission.ended(errand)
            self._end_ask(cancel.id, outcome)
            self._changed()

    def _end_ask(self, ask: str, outcome: Outcome) -> None:
        self._outbox.put_nowait(told(ask, outcome))

    # The request loop.

    async def _work(self) -> None:
        """Run requests until stopped and none may start any more."""
        while True:
            ready = self._workers.ready
            if ready is not None and ready is not self._agreed:
                await self._agree(ready)
                continue
            errand = self._stopping.next() if ready is not None else None
            if errand is not None:
                await self._do(errand)
            elif self._stopping.is_time:
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _agree(self, ready: Ready) -> None:
        with suppress(WorkersLostError):
            await self._put_back(ready)
            self._agreed = ready

    async def _put_back(self, ready: Ready) -> None:
        for model in await self._recovery.agree(ready):
            self._queue.unsettle(model)
        if self._workers.ready is ready:
            self._workers.serve()

    def _draws_from(self, path: str | None, errand: Task) -> bool:
        assert isinstance(errand.work, Sample)
        try:
            return self._sampling.path(errand.work, errand.owner) == path
        except RequestError:
            return False

    async def _do(self, errand: Task) -> None:
        """Run a task; retry if the workers died and the model is then as before."""
        self._changed()
        retries = self._settings.worker_max_retries
        errands, outcomes = await self._tried(errand, [errand])
        while retries and self._may_retry(errand, outcomes) and await self._workers_are_back():
            LOG.warning("%s is tried again: %s", type(errand.work).__name__, outcomes[0])
            retries -= 1
            errands, outcomes = await self._tried(errand, errands)
        for each, outcome in zip(errands, outcomes, strict=True):
            self._end(each, outcome)
        if not all(isinstance(outcome, RequestError) for outcome in outcomes):
            self._workers.losses = 0
        self._changed()

    def _may_retry(self, errand: Task, outcomes: list[Outcome]) -> bool:
        """Whether it was lost with the workers and can be retried safely."""
        lost = all(isinstance(outcome, WorkersLostError) for outcome in outcomes)
        if any(isinstance(outcome, OperationTimeoutError) for outcome in outcomes):
            return False
        return lost and (
            isinstance(errand.work, Sample)
            or self._training.is_repeatable(cast(Trained | CreateModel, errand.work))
        )

    async def _workers_are_back(self) -> bool:
        """Wait for restored workers; returns whether they came back."""
        while not self._stopping.is_asked and self._workers.state != "failed":
            ready = self._workers.ready
            if ready is None:
                self._wake.clear()
                await self._wake.wait()
            elif ready is self._agreed:
                return True
            else:
                await self._agree(ready)
        return False

    async def _tried(self, errand: Task, errands: list[Task]) -> tuple[list[Task], list[Outcome]]:
        """Run a task and those batched with it; returns the outcomes."""
        outcomes: list[Outcome]
        try:
            if isinstance(errand.work, Sample):
                path = self._sampling.path(errand.work, errand.owner)
                most = self._settings.max_joined_samples - len(errands)
                errands = errands + self._queue.take_alike(most, partial(self._draws_from, path))
                outcomes = await self._draw(errands)
            else:
                outcomes = [await self._result(errand)]
        except RequestError as error:
            outcomes = [error] * len(errands)
        except Exception as error:  # noqa: BLE001 - a failed request must not stop others
            outcomes = [internal_error(error)] * len(errands)
        return errands, outcomes

    async def _draw(self, errands: list[Task]) -> list[Outcome]:
        refused: dict[int, RequestError] = {}
        for index, errand in enumerate(errands):
            try:
                self._admission.check(errand)
            except RequestError as error:
                refused[index] = error
        works = [
            (cast(Sample, errand.work), errand.owner)
            for index, errand in enumerate(errands)
            if index not in refused
        ]
        drawn = iter(await self._sampling.draw(works))
        return [refused.get(index) or next(drawn) for index in range(len(errands))]

    async def _result(self, errand: Task) -> Result:
        self._admission.check(errand)
        if isinstance(errand.work, CreateModel):
            record = build_model_record(errand.work, errand.owner)
            return await self._training.create(errand.work, record, errand.owner)
        work = cast(Trained, errand.work)
        if errand.is_ours and not self._retiring.is_to_go(work.model):
            raise RequestError("cancelled", "its client is there again")
        why = self._retiring.why(work.model) if errand.is_ours else "it was unloaded"
        return await self._training.do(work, errand.owner, why)

    def _end(self, errand: Task, outcome: Outcome) -> None:
        self._queue.end(errand, outcome)
        self._admission.ended(errand)
        if errand.is_ours and isinstance(outcome, RequestError):
            LOG.warning("model %s was not unloaded: %s", errand.model, outcome)
        for ask in errand.asks:
            self._end_ask(ask, outcome)

    # Periodic tasks.

    async def _look(self) -> None:
        next_retiring = 0.0
        while True:
            now = time.monotonic()
            for errand in self._queue.overdue(now):
                assert errand.outcome is not None
                self._admission.ended(errand)
                for ask in errand.asks:
                    self._end_ask(ask, errand.outcome)
            if now >= next_retiring:
                self._retire()
                next_retiring = now + self._retiring.interval
            self._wake.set()
            await asyncio.sleep(min(LOOK_SECONDS, self._settings.sequence_gap_timeout / 4))

    def _retire(self) -> None:
        try:
            self._retiring.sweep()
        except Exception:
            # For example a full disk or a replaced folder: continue to serve.
            LOG.exception("what is over could not be looked for")
        self._changed()

    async def _tell(self) -> None:
        interval = self._settings.status_interval
        while True:
            # Skip the status if the API is behind.
            if self._outbox.empty():
                self._say()
            with suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._news.wait()
            self._news.clear()
            await asyncio.sleep(min(NEWS_SECONDS, interval))

    def _changed(self) -> None:
        if self._workers.state != self._said:
            self._say()
        if self._workers.state == "failed":
            self._give_up()
        self._news.set()
        self._wake.set()

    def _say(self) -> None:
        self._said = self._workers.state
        self._outbox.put_nowait(self._status())

    def _give_up(self) -> None:
        """The workers have failed permanently: fail all waiting requests."""
        error = RequestError("unavailable", self._workers.reason)
        for errand in self._queue.abandon():
            self._admission.ended(errand)
            for ask in errand.asks:
                self._end_ask(ask, error)

    def _status(self) -> Status:
        running = self._queue.running
        asks = running[0].asks if running else []
        return Status(
            workers=self._workers.state,
            reason=self._workers.reason,
            queued=len(self._queue),
            running=asks[0] if asks else "",
        )

    # Worker state.

    def _served(self) -> Served | None:
        return self._workers.last.served if self._workers.last else None

    def _served_now(self) -> Served:
        served = self._served()
        if served is None:
            raise RequestError(
                "unavailable", "the workers are starting, and it is not known yet what is served"
            )
        return served

    def _base_names(self) -> list[str]:
        return [self._served_now().base_model, *self._settings.base_names]
