"""Graceful shutdown: running requests end, unsaved models are saved, and our workers exit.

Checkpoints contain no gradients, so passes whose optimizer step is already waiting are completed
through that step.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.server.protocol.requests import OptimStep
from penstock.server.scheduler.errors import RequestError, WorkersLostError
from penstock.server.scheduler.models import Models
from penstock.server.scheduler.queue import RequestQueue, Task
from penstock.server.scheduler.settings import SchedulerSettings
from penstock.server.scheduler.state_store import ModelRecord
from penstock.server.scheduler.training import TrainingRequests
from penstock.server.scheduler.worker_client import WorkerClient

LOG = logging.getLogger(__name__)

API_SECONDS = 8.0
"""Seconds for the API to exit after a stop request; one that stays longer is not stopped."""

STEP_WAIT_SECONDS = 0.5
"""Seconds to wait for the optimizer step of passes that were complete at the stop request."""


@dataclass
class GracefulShutdown:
    """The shutdown state and procedure."""

    settings: SchedulerSettings
    queue: RequestQueue
    workers: WorkerClient
    models: Models
    training: TrainingRequests
    _requested: asyncio.Event = field(default_factory=asyncio.Event)
    _requested_at: float = 0.0
    _no_api: asyncio.Event = field(default_factory=asyncio.Event)  # Set while no API is connected

    def __post_init__(self) -> None:
        self._no_api.set()

    @property
    def is_requested(self) -> bool:
        return self._requested.is_set()

    @property
    def is_drained(self) -> bool:
        """Whether all requests that must still run have ended."""
        late = time.monotonic() - self._requested_at > STEP_WAIT_SECONDS
        return self._requested.is_set() and (
            late or not any(map(self._has_gradients, self.models.open()))
        )

    def request_stop(self) -> None:
        if not self._requested.is_set():
            LOG.info("stop requested: running requests are completed, and unsaved models are saved")
            self._requested_at = time.monotonic()
            self._requested.set()

    def on_api_connected(self) -> None:
        self._no_api.clear()

    def on_api_lost(self) -> None:
        self._no_api.set()
        if not self._requested.is_set():
            LOG.warning("the API process is gone; its running requests continue")

    def next_task(self) -> Task | None:
        """The next request to run; during shutdown only those that must still run. The rest is not
        rejected: clients submit it again to the next process, and an error would end them."""
        is_requested = self._requested.is_set()
        return self.queue.take(self._must_still_run) if is_requested else self.queue.take()

    def _must_still_run(self, task: Task) -> bool:
        record = self.models.get(task.model) if task.model else None
        return (
            record is not None
            and record.is_open
            and self._has_gradients(record)
            and self.queue.has_waiting(record.model, OptimStep)
        )

    def _has_gradients(self, record: ModelRecord) -> bool:
        return self.models.get_state(record).has_gradients

    async def run(self, working: "asyncio.Task[None]", leave: Callable[[], None]) -> None:
        """Wait for a stop request, then shut down. `working` ends when no request may start;
        `leave` writes the state for the next process."""
        await self._requested.wait()
        loop = asyncio.get_running_loop()
        api_ends_by = loop.time() + API_SECONDS
        ended: dict[str, str] = {}
        why = f"stop_timeout expired; it is {self.settings.stop_timeout:g} s"
        try:
            async with asyncio.timeout(self.settings.stop_timeout):
                # Awaited directly: the timeout cancels it, too, for which the task group waits.
                await working
                await self._save(ended)
        except TimeoutError:
            pass
        except WorkersLostError as error:
            why = str(error)
        for record in self.training.unsaved():
            if fault := ended.get(record.model, why):
                reason = " ".join(fault.split())
                LOG.warning(
                    "model %s is not saved since step %d: %s", record.model, record.step, reason
                )
        leave()
        try:
            async with asyncio.timeout_at(api_ends_by):
                await self._no_api.wait()
        except TimeoutError:
            return
        if self.settings.ends_workers:
            await self.workers.shut_down()

    async def _save(self, ended: dict[str, str]) -> None:
        """Save all unsaved models; `ended` receives the reason for each that could not be saved, or
        "". Raises WorkersLostError."""
        for record in self.training.unsaved():
            try:
                ref = await self.training.save(record)
            except WorkersLostError:
                raise
            except (RequestError, OSError) as error:
                ended[record.model] = str(error)
            else:
                ended[record.model] = ""
                lost = "; gradients since then are not" if record.is_unsaved else ""
                LOG.info("model %s is saved at step %d: %s%s", ref.model, record.step, ref, lost)
