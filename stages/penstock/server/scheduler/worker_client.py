"""Worker client: sends commands, and tracks whether the workers are alive.

A command fails at once when the workers die. Their supervisor restarts them; this class only counts
consecutive losses.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, TypeVar

from penstock.server.protocol.codec import Channel, FrameError, PeerLostError
from penstock.server.protocol.results import ServedModel
from penstock.server.protocol.worker_commands import (
    Command,
    CommandFailure,
    FromWorkers,
    Hello,
    Ready,
    Reply,
    Result,
    Shutdown,
    ToWorkers,
    WorkerHeartbeat,
    WorkerOperation,
)
from penstock.server.scheduler.errors import OperationTimeoutError, RequestError, WorkersLostError
from penstock.server.scheduler.settings import SchedulerSettings

LOG = logging.getLogger(__name__)

EXIT_SECONDS = 5.0  # Seconds for the workers to exit after a shutdown message

R = TypeVar("R", bound=Result)
WorkersState = Literal["starting", "ready", "down", "failed"]


class WorkerClient:
    """All ranks, reached through rank 0."""

    def __init__(
        self,
        channel: Channel[ToWorkers, FromWorkers],
        settings: SchedulerSettings,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when `state` or `ready` may have changed."""
        self._channel = channel
        self._settings = settings
        self._changed = changed
        # Part of the ids of commands: a reply to one of an earlier process is not taken for ours.
        self._name = uuid.uuid4().hex[:12]
        self._numbers = 0
        self._outbox: asyncio.Queue[ToWorkers] = asyncio.Queue()
        self._waiting: dict[str, asyncio.Future[Reply]] = {}  # By the id of the command
        self._heard = time.monotonic()
        self._replied_at = self._heard
        self._disconnected = asyncio.Event()
        self._exiting_instance = ""  # The exiting instance, whose loss has already been counted
        self.ready: Ready | None = None  # The state of the connected workers, or None
        self.last: Ready | None = None  # The last state of connected workers
        self.state: WorkersState = "starting"
        self.reason = ""
        self.consecutive_losses = 0  # Losses since the last completed request

    async def receive_loop(self) -> None:
        while True:
            try:
                message = await self._channel.receive()
            except PeerLostError:
                self._disconnected.set()
                if self._exiting_instance:
                    self._drop_unsent()
                else:
                    self.mark_lost("their rank 0 ended")
                self._exiting_instance = ""
                continue
            self._heard = time.monotonic()
            match message:
                case Ready():
                    self._greeted(message)
                case Reply() | CommandFailure():
                    self._replied(message)
                case WorkerHeartbeat():
                    if self.ready is not None and message.instance != self.ready.instance:
                        self.mark_lost("other workers replaced them")

    async def send_loop(self) -> None:
        # Only this task waits for a slow peer.
        while True:
            message = await self._outbox.get()
            try:
                await self._channel.send(message)
            except FrameError as error:
                if isinstance(message, Command):
                    self._fail(message.id, RequestError("invalid", str(error)))

    async def liveness_loop(self) -> None:
        timeout, given_up = self._settings.worker_connection_timeout, self._settings.given_up
        silence = f"nothing was heard of them for {timeout:g} s"
        while True:
            is_silent = time.monotonic() - self._heard > timeout
            if self.ready is not None:
                if is_silent:
                    self._give_up(silence)
            else:
                if self.state != "failed" and given_up is not None and given_up.exists():
                    self.state = "failed"
                    self.reason = f"{self.reason or 'the workers ended'}; they are not restarted"
                    self._changed()
                # One at a time: all that are not sent yet would reach workers that connect late.
                if self._outbox.empty():
                    self._outbox.put_nowait(Hello(instance=self._name))
                if is_silent and self.state == "starting" and not self.reason:
                    self.reason = silence
                    self._changed()
            await asyncio.sleep(self._settings.status_interval)

    @property
    def served(self) -> ServedModel:
        """The served model. Raises RequestError before workers have ever connected."""
        if self.last is None:
            raise RequestError(
                "unavailable", "the workers are starting; the served model is not known yet"
            )
        return self.last.served

    @property
    def base_names(self) -> list[str]:
        """The names of the base model. Raises RequestError as `served`."""
        return [self.served.base_model, *self._settings.base_names]

    async def run(self, order: WorkerOperation, kind: type[R]) -> R:
        """Run a command and return its result, of this type. Raises RequestError, or
        WorkersLostError if the workers die."""
        if self.ready is None:
            raise WorkersLostError(self.reason or "the workers are not connected")
        self._numbers += 1
        name = f"{self._name}-{self._numbers}"
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[name] = future
        self._outbox.put_nowait(Command(id=name, operation=order))
        limit, sent = self._settings.operation_timeout, time.monotonic()
        try:
            while not future.done():
                # A request that runs with others has more time as long as any of them ends.
                left = max(sent, self._replied_at) + limit - time.monotonic()
                if left <= 0:
                    future.cancel()
                    operation = type(order).__name__
                    self._give_up(f"{operation} took more than operation_timeout ({limit:g} s)")
                    raise OperationTimeoutError(self.reason)
                await asyncio.wait({future}, timeout=left)
            result = future.result().result
        finally:
            self._waiting.pop(name, None)
        if not isinstance(result, kind):
            raise RequestError(
                "internal",
                f"the workers returned a {type(result).__name__} for a {type(order).__name__}",
            )
        return result

    async def shut_down(self) -> None:
        """Shut down the workers and wait for EXIT_SECONDS."""
        if self.ready is None:
            return
        self._exiting_instance, self.ready = self.ready.instance, None
        self._disconnected.clear()
        self._outbox.put_nowait(Shutdown())
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_SECONDS):
                await self._disconnected.wait()

    def mark_lost(self, why: str) -> None:
        """The workers are gone, with all their state."""
        if self.state == "failed":
            return
        self.ready = None
        self.consecutive_losses += 1
        LOG.warning("the workers are lost (%s), %d in a row", why, self.consecutive_losses)
        limit = self._settings.worker_max_restarts
        if self.consecutive_losses > limit:
            self.state = "failed"
            self.reason = (
                f"the workers were lost {self.consecutive_losses} times in a row, the last time as"
                f" {why}; worker_max_restarts is {limit}"
            )
        else:
            self.state = "down"
            self.reason = f"the workers were lost: {why}"
        # Else the next workers would run a command whose request has failed.
        self._drop_unsent()
        for name in self._waiting:
            self._fail(name, WorkersLostError(self.reason))
        self._changed()

    def _drop_unsent(self) -> None:
        while not self._outbox.empty():
            self._outbox.get_nowait()

    def serve(self) -> None:
        """The workers are restored and may run requests."""
        if self.ready is not None:
            self.state, self.reason = "ready", ""
            self._changed()

    def _give_up(self, why: str) -> None:
        # The workers may be alive but hung: tell them to exit.
        if self.ready is not None:
            self._exiting_instance = self.ready.instance
            self.mark_lost(why)
            self._outbox.put_nowait(Shutdown())

    def _greeted(self, ready: Ready) -> None:
        if self.ready is not None and self.ready.instance == ready.instance:
            return
        if ready.instance == self._exiting_instance:
            self._outbox.put_nowait(Shutdown())
            return
        self._exiting_instance = ""
        if self.ready is not None:
            self.mark_lost("other workers replaced them")
        LOG.info("the workers are connected: %s", ready.instance)
        if self.state == "failed":
            # They were restarted once more, which is their last try.
            self.state = "down"
            self.consecutive_losses = self._settings.worker_max_restarts
        self.ready = self.last = ready
        self._changed()

    def _replied(self, message: Reply | CommandFailure) -> None:
        self._replied_at = time.monotonic()
        future = self._waiting.get(message.id)
        if future is None:
            LOG.info("a reply to %s, which is not waited for", message.id)
            return
        if isinstance(message, CommandFailure):
            self._fail(message.id, RequestError(message.code, message.error, message.category))
            if message.needs_restart:
                self._give_up(message.error)
        elif not future.done():
            future.set_result(message)

    def _fail(self, name: str, error: RequestError) -> None:
        future = self._waiting.get(name)
        if future is not None and not future.done():
            future.set_exception(error)
