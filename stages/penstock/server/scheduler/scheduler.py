"""The scheduler: receives requests from the API, runs them in order, and replies.

Runs in one event loop, which makes all state changes. Requests that need workers run one at a time,
or several sampling requests for the same weights together; all others run immediately.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, cast

from penstock.server.protocol.codec import Channel, FrameError, PeerLostError
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
from penstock.server.protocol.requests import (
    AddEndpoint,
    CreateModel,
    ImmediateOperation,
    ModelOperation,
    Sample,
    TrainingOperation,
)
from penstock.server.protocol.results import Result
from penstock.server.protocol.worker_commands import FromWorkers, Ready, ToWorkers
from penstock.server.scheduler.admission import Admission
from penstock.server.scheduler.checkpoint_catalog import CheckpointCatalog
from penstock.server.scheduler.errors import (
    OperationTimeoutError,
    RequestError,
    WorkersLostError,
    to_request_error,
)
from penstock.server.scheduler.expiry import Expiry
from penstock.server.scheduler.immediate_requests import ImmediateRequests
from penstock.server.scheduler.inference_endpoints import InferenceEndpoints
from penstock.server.scheduler.models import Models
from penstock.server.scheduler.queue import Outcome, RequestQueue, Task, to_response
from penstock.server.scheduler.recovery import Recovery
from penstock.server.scheduler.sampling import SamplingRequests
from penstock.server.scheduler.save_checkpoint import CheckpointSaver
from penstock.server.scheduler.sessions import Sessions
from penstock.server.scheduler.settings import SchedulerSettings
from penstock.server.scheduler.shutdown import GracefulShutdown
from penstock.server.scheduler.state_store import QueueState, ShutdownState, StateStore
from penstock.server.scheduler.storage import Storage, TrashCollector
from penstock.server.scheduler.training import TrainingRequests
from penstock.server.scheduler.worker_client import WorkerClient, WorkersState
from penstock.server.weight_sync.allowed_hosts import allowed_hosts

LOG = logging.getLogger(__name__)

CHECK_SECONDS = 0.1  # Seconds between checks for requests that wait for a missing sequence number
MIN_STATUS_SECONDS = 0.05


class Scheduler:
    """The scheduler, between the API channel and the worker channel."""

    def __init__(
        self,
        settings: SchedulerSettings,
        api: Channel[FromScheduler, ToScheduler],
        workers: Channel[ToWorkers, FromWorkers],
    ) -> None:
        """Restore the state of an earlier process. Raises StateStoreError if it cannot be read."""
        self._settings = settings
        self._api = api
        self._wake = asyncio.Event()
        self._outbox: asyncio.Queue[FromScheduler] = asyncio.Queue()
        self._status_changed = asyncio.Event()
        self._reported_state: WorkersState | None = None  # The last reported state of the workers
        self._api_instance: str | None = None
        self._restored_workers: Ready | None = None  # The workers whose models are restored
        hosts = allowed_hosts(settings.sync_allowed_hosts, requires_keys=settings.requires_keys)
        storage, trash = Storage(settings.output_dir, settings.storage_limit), TrashCollector()
        store = StateStore(storage.root)
        sessions, models = Sessions(store, settings), Models(store)
        checkpoints = CheckpointCatalog(store, storage)
        queue = RequestQueue(settings.sequence_gap_timeout)
        client = WorkerClient(workers, settings, self._on_change)
        self._store, self._queue, self._workers = store, queue, client
        self._endpoints = InferenceEndpoints(store, hosts)
        self._recovery = Recovery(client, store, models, checkpoints)
        saver = CheckpointSaver(client, store, storage, models, trash)
        self._training = TrainingRequests(
            settings, client, store, sessions, models, checkpoints, saver, hosts
        )
        self._admission = Admission(queue, sessions, models, client, settings)
        self._sampling = SamplingRequests(client, sessions, checkpoints, self._admission.check)
        self._expiry = Expiry(
            settings.idle_session_timeout, queue, sessions, models, checkpoints, trash.discard
        )
        self._immediate = ImmediateRequests(
            self._endpoints, sessions, models, checkpoints, client, queue, self._expiry, trash
        )
        self._shutdown = GracefulShutdown(settings, queue, client, models, self._training)
        # Continue from where the previous process stopped or died.
        state = store.take_shutdown_state()
        self._admission.untouched.update(state.untouched)
        for record in models.open():
            queue.restore(record.model, state.lanes.get(record.model, QueueState()))

    async def run(self) -> None:
        """Serve until cancelled, or until stopped and everything is saved that could be."""
        serving: tuple[Coroutine[Any, Any, None], ...] = (
            self._receive(),
            self._send(),
            self._workers.receive_loop(),
            self._workers.send_loop(),
            self._workers.liveness_loop(),
            self._check_periodically(),
            self._send_status_periodically(),
        )
        async with asyncio.TaskGroup() as tasks:
            # A loop that raises ends the group, thus the process, which the launcher starts again.
            running = [tasks.create_task(coroutine) for coroutine in serving]
            await self._shutdown.run(
                tasks.create_task(self._run_tasks()), self._save_shutdown_state
            )
            # They never return, and the group waits for them; cancelled tasks are no errors to it.
            for task in running:
                task.cancel()

    def stop(self) -> None:
        """Request an orderly end of `run`."""
        self._shutdown.request_stop()
        self._wake.set()

    def _save_shutdown_state(self) -> None:
        state = ShutdownState(lanes=self._queue.left(), untouched=self._admission.untouched)
        try:
            self._store.write_shutdown_state(state)
        except OSError as error:
            LOG.warning("the outcomes cannot be saved for the next process: %s", error)

    # Messages from and to the API.

    async def _receive(self) -> None:
        while True:
            try:
                message = await self._api.receive()
            except PeerLostError:
                self._shutdown.on_api_lost()
                continue
            match message:
                case Hello():
                    self._shutdown.on_api_connected()
                    self._on_hello(message)
                case Request():
                    self._on_request(message)
                case Cancel():
                    self._on_cancel(message)

    async def _send(self) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await self._api.send(message)
            except FrameError as error:
                # Its client would otherwise wait for a result that no message can hold.
                if isinstance(message, Response | Failure):
                    failure = RequestError("internal", f"the response cannot be sent: {error}")
                    await self._api.send(failure.failure(message.id))

    def _on_hello(self, hello: Hello) -> None:
        if self._api_instance not in (None, hello.instance):
            # The clients' futures ended with the earlier process: nobody would fetch the outcomes.
            dropped = self._queue.drop_waiting()
            for task in dropped:
                self._admission.on_task_end(task)
            LOG.info("another API process connected; %d waiting requests are dropped", len(dropped))
        self._api_instance = hello.instance
        self._send_status()

    def _on_request(self, request: Request) -> None:
        try:
            operation = request.operation
            if isinstance(operation, ModelOperation | Sample):
                outcome = self._admission.admit(request, operation)
                if outcome is not None:
                    self._respond(request.id, outcome)
                self._on_change()
            elif isinstance(operation, AddEndpoint):
                self._endpoints.add(operation, request.owner, partial(self._respond, request.id))
            else:
                result = self._immediate.run(cast(ImmediateOperation, operation), request.owner)
                self._respond(request.id, result)
        except Exception as error:  # noqa: BLE001 - a failed request must not stop others
            self._respond(request.id, to_request_error(error))

    def _on_cancel(self, cancel: Cancel) -> None:
        outcome = RequestError("cancelled", "it was cancelled before it started")
        if self._queue.is_waiting(cancel.id):
            task = self._queue.cancel(cancel.id, outcome)
            if task is not None:
                self._admission.on_task_end(task)
            self._respond(cancel.id, outcome)
            self._on_change()

    def _respond(self, request_id: str, outcome: Outcome) -> None:
        self._outbox.put_nowait(to_response(request_id, outcome))

    # The request loop.

    async def _run_tasks(self) -> None:
        """Run requests until stopped and none may start any more."""
        while True:
            ready = self._workers.ready
            if ready is not None and ready is not self._restored_workers:
                await self._restore_models(ready)
                continue
            task = self._shutdown.next_task() if ready is not None else None
            if task is not None:
                await self._run_task(task)
            elif self._shutdown.is_drained:
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _restore_models(self, ready: Ready) -> None:
        with suppress(WorkersLostError):
            for model in await self._recovery.restore(ready):
                self._queue.accept_any_next(model)
            if self._workers.ready is ready:
                self._workers.serve()
            self._restored_workers = ready

    async def _run_task(self, task: Task) -> None:
        """Run a task; retry if the workers died and the model is then as before."""
        self._on_change()
        retries, tasks = self._settings.worker_max_retries, [task]
        while True:
            lost = await self._try_tasks(tasks)
            if not lost:
                return
            can_retry = all(self._can_retry(task, outcome) for task, outcome in lost)
            if not retries or not can_retry or not await self._wait_for_workers():
                for task, outcome in lost:
                    self._finish(task, outcome)
                return
            for task, outcome in lost:
                LOG.warning("%s is retried: %s", type(task.operation).__name__, outcome)
            retries -= 1
            tasks = [task for task, _ in lost]

    def _can_retry(self, task: Task, outcome: Outcome) -> bool:
        """Whether a task that was lost with the workers can be retried safely."""
        if isinstance(outcome, OperationTimeoutError):
            return False
        return isinstance(task.operation, Sample) or self._training.is_repeatable(task.operation)

    async def _wait_for_workers(self) -> bool:
        """Wait for restored workers; returns whether they came back."""
        while not self._shutdown.is_requested and self._workers.state != "failed":
            ready = self._workers.ready
            if ready is None:
                self._wake.clear()
                await self._wake.wait()
            elif ready is self._restored_workers:
                return True
            else:
                await self._restore_models(ready)
        return False

    async def _try_tasks(self, tasks: list[Task]) -> list[tuple[Task, Outcome]]:
        """Run a task, or sampling tasks for the same weights, which others join as they arrive.
        Finishes each, and returns those that were lost with the workers."""
        running: dict[asyncio.Task[Outcome], Task] = {}
        lost: list[tuple[Task, Outcome]] = []
        may_join = self._joining(tasks[0])
        try:
            while True:
                if may_join is not None and not lost and not self._shutdown.is_requested:
                    room = self._settings.max_joined_samples - len(running) - len(tasks)
                    tasks = [*tasks, *self._queue.take_batch(room, may_join)]
                for task in tasks:
                    running[asyncio.create_task(self._attempt(task))] = task
                tasks = []
                if not running:
                    return lost
                self._wake.clear()
                await self._wait_for_any(running)
                for attempt in [attempt for attempt in running if attempt.done()]:
                    task, outcome = running.pop(attempt), attempt.result()
                    if isinstance(outcome, WorkersLostError):
                        lost.append((task, outcome))
                    else:
                        self._finish(task, outcome)
        finally:
            for attempt in running:
                attempt.cancel()

    def _joining(self, task: Task) -> Callable[[Task], bool] | None:
        """Which tasks may join this one; None: none."""
        if not isinstance(task.operation, Sample):
            return None
        try:
            return partial(self._sampling.is_from, self._sampling.resolve_path(task))
        except RequestError:
            return None

    async def _wait_for_any(self, running: Iterable[asyncio.Task[Outcome]]) -> None:
        """Wait until an attempt ends, or something has changed."""
        waking = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait({waking, *running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waking.cancel()

    async def _attempt(self, task: Task) -> Outcome:
        try:
            if isinstance(task.operation, Sample):
                return await self._sampling.sample(task)
            return await self._run_operation(task)
        except Exception as error:  # noqa: BLE001 - a failed request must not stop others
            return to_request_error(error)

    def _finish(self, task: Task, outcome: Outcome) -> None:
        self._queue.end(task, outcome)
        if task.is_internal and isinstance(outcome, RequestError):
            LOG.warning("model %s was not unloaded: %s", task.model, outcome)
        self._respond_to_all(task, outcome)
        if not isinstance(outcome, RequestError):
            self._workers.consecutive_losses = 0
        self._on_change()

    async def _run_operation(self, task: Task) -> Result:
        self._admission.check(task)
        if isinstance(task.operation, CreateModel):
            return await self._training.create(task.operation, task.owner)
        operation = cast(TrainingOperation, task.operation)
        if task.is_internal and not self._expiry.is_expired(operation.model):
            raise RequestError("cancelled", "its client is active again")
        why = self._expiry.unload_reason(operation.model) if task.is_internal else "it was unloaded"
        return await self._training.run(operation, task.owner, why)

    def _respond_to_all(self, task: Task, outcome: Outcome) -> None:
        self._admission.on_task_end(task)
        for request_id in task.request_ids:
            self._respond(request_id, outcome)

    # Periodic tasks.

    async def _check_periodically(self) -> None:
        next_expiry = 0.0
        while True:
            now = time.monotonic()
            for task in self._queue.pop_overdue(now):
                assert task.outcome is not None
                self._respond_to_all(task, task.outcome)
            if now >= next_expiry:
                try:
                    self._expiry.sweep()
                except Exception:
                    # For example a full disk or a replaced folder: continue to serve.
                    LOG.exception("the check for expired sessions and checkpoints failed")
                self._on_change()
                next_expiry = now + self._expiry.interval
            # Whether all has ended depends on time, too, of which nothing else tells that loop.
            self._wake.set()
            await asyncio.sleep(min(CHECK_SECONDS, self._settings.sequence_gap_timeout / 4))

    async def _send_status_periodically(self) -> None:
        interval = self._settings.status_interval
        while True:
            # Skip the status if the API is behind.
            if self._outbox.empty():
                self._send_status()
            with suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._status_changed.wait()
            self._status_changed.clear()
            await asyncio.sleep(min(MIN_STATUS_SECONDS, interval))

    def _on_change(self) -> None:
        if self._workers.state != self._reported_state:
            self._send_status()
        if self._workers.state == "failed":
            error = RequestError("unavailable", self._workers.reason)
            for task in self._queue.drop_waiting():
                self._respond_to_all(task, error)
        self._status_changed.set()
        self._wake.set()

    def _send_status(self) -> None:
        self._reported_state = self._workers.state
        running = self._queue.running
        request_ids = running[0].request_ids if running else []
        self._outbox.put_nowait(
            Status(
                workers=self._workers.state,
                reason=self._workers.reason,
                queued=len(self._queue),
                running=request_ids[0] if request_ids else "",
            )
        )
