"""Worker client: sends one command at a time, and tracks whether the workers are alive.

A command fails at once when the workers die. Their supervisor restarts them; this class only counts
consecutive losses.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from penstock.server.protocol.codec import Channel, FrameError, PeerLostError
from penstock.server.protocol.worker_commands import (
    Beat,
    Command,
    Fault,
    FromWorkers,
    Hello,
    Order,
    Ready,
    Reply,
    Shutdown,
    ToWorkers,
)
from penstock.server.scheduler.errors import (
    OperationTimeoutError,
    RequestError,
    WorkersLostError,
)
from penstock.server.scheduler.settings import EngineSettings

LOG = logging.getLogger(__name__)

LEAVING_SECONDS = 5.0
"""Seconds for the workers to exit after a shutdown message."""

State = Literal["starting", "ready", "down", "failed"]


class Workers:
    """All ranks, reached through rank 0."""

    def __init__(
        self,
        channel: Channel[ToWorkers, FromWorkers],
        settings: EngineSettings,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when `state` or `ready` may have changed."""
        self._channel = channel
        self._settings = settings
        self._changed = changed
        self._name = uuid.uuid4().hex[:12]
        self._numbers = 0
        self._outbox: asyncio.Queue[ToWorkers] = asyncio.Queue()
        self._waiting: tuple[str, asyncio.Future[Reply]] | None = None
        self._heard = time.monotonic()
        self._gone = asyncio.Event()
        self._leaving = ""
        """The exiting instance, whose loss has already been counted."""
        self.ready: Ready | None = None
        """The state of the connected workers, or None."""
        self.last: Ready | None = None
        """The last state of connected workers."""
        self.state: State = "starting"
        self.reason = ""
        self.losses = 0
        """Losses since the last completed request."""

    async def hear(self) -> None:
        """Receive loop."""
        while True:
            try:
                message = await self._channel.receive()
            except PeerLostError:
                self._gone.set()
                if self._leaving:
                    self._forget_unsent()
                else:
                    self.lose("their first process ended")
                self._leaving = ""
                continue
            self._heard = time.monotonic()
            match message:
                case Ready():
                    self._greeted(message)
                case Reply() | Fault():
                    self._replied(message)
                case Beat():
                    if self.ready is not None and message.instance != self.ready.instance:
                        self.lose("others took their place")

    async def speak(self) -> None:
        """Send loop; only this task waits for a slow peer."""
        while True:
            message = await self._outbox.get()
            try:
                await self._channel.send(message)
            except FrameError as error:
                if isinstance(message, Command):
                    self._fail(message.id, RequestError("invalid", str(error)))

    async def greet(self) -> None:
        """Hello and liveness loop."""
        while True:
            is_silent = time.monotonic() - self._heard > self._timeout
            silence = f"nothing was heard of them for {self._timeout:g} s"
            if self.ready is not None:
                if is_silent:
                    self._give_up(silence)
            else:
                self._look_whether_any_come()
                if self._outbox.empty():
                    self._outbox.put_nowait(Hello(engine=self._name))
                if is_silent and self.state == "starting" and not self.reason:
                    self.reason = silence
                    self._changed()
            await asyncio.sleep(self._settings.status_interval)

    async def command(self, order: Order) -> Any:
        """Run a command and return the reply. Raises RequestError, or WorkersLostError if the
        workers die.

        One at a time.
        """
        assert self._waiting is None
        if self.ready is None:
            raise WorkersLostError(self.reason or "the workers are not there")
        self._numbers += 1
        name = f"{self._name}-{self._numbers}"
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting = (name, future)
        self._outbox.put_nowait(Command(id=name, order=order))
        limit = self._settings.operation_timeout
        try:
            async with asyncio.timeout(limit):
                return (await future).result
        except TimeoutError:
            what = type(order).__name__
            self._give_up(f"{what} took more than operation_timeout ({limit:g} s)")
            raise OperationTimeoutError(self.reason) from None
        finally:
            self._waiting = None

    async def dismiss(self) -> None:
        """Shut down the workers and wait for LEAVING_SECONDS."""
        if self.ready is None:
            return
        self._leaving, self.ready = self.ready.instance, None
        self._gone.clear()
        self._outbox.put_nowait(Shutdown())
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVING_SECONDS):
                await self._gone.wait()

    def lose(self, why: str) -> None:
        """The workers are gone, with all their state."""
        if self.state == "failed":
            return
        self.ready = None
        self.losses += 1
        LOG.warning("the workers are lost (%s), %d in a row", why, self.losses)
        limit = self._settings.worker_max_restarts
        if self.losses > limit:
            self.state = "failed"
            self.reason = (
                f"the workers were lost {self.losses} times in a row, the last time as {why};"
                f" worker_max_restarts is {limit}"
            )
        else:
            self.state = "down"
            self.reason = f"the workers were lost: {why}"
        self._forget_unsent()
        if self._waiting is not None:
            self._fail(self._waiting[0], WorkersLostError(self.reason))
        self._changed()

    def _forget_unsent(self) -> None:
        """Drop unsent commands to the lost workers."""
        while not self._outbox.empty():
            self._outbox.get_nowait()

    def serve(self) -> None:
        """The workers are restored and may run requests."""
        if self.ready is not None:
            self.state, self.reason = "ready", ""
            self._changed()

    @property
    def _timeout(self) -> float:
        return self._settings.worker_connection_timeout

    def _look_whether_any_come(self) -> None:
        file = self._settings.given_up
        if self.state != "failed" and file is not None and file.exists():
            self.state = "failed"
            self.reason = f"{self.reason or 'the workers ended'}; they are not started any more"
            self._changed()

    def _give_up(self, why: str) -> None:
        """The workers may be alive but hung: tell them to exit."""
        if self.ready is not None:
            self._leaving = self.ready.instance
            self.lose(why)
            self._outbox.put_nowait(Shutdown())

    def _greeted(self, ready: Ready) -> None:
        if self.ready is not None and self.ready.instance == ready.instance:
            return
        if ready.instance == self._leaving:
            self._outbox.put_nowait(Shutdown())
            return
        self._leaving = ""
        if self.ready is not None:
            self.lose("others took their place")
        LOG.info("the workers are there: %s", ready.instance)
        if self.state == "failed":
            # They were restarted once more, which is their last try.
            self.state = "down"
            self.losses = self._settings.worker_max_restarts
        self.ready = self.last = ready
        self._changed()

    def _replied(self, message: Reply | Fault) -> None:
        if self._waiting is None or self._waiting[0] != message.id:
            LOG.info("a reply to %s, for which nobody waits", message.id)
            return
        if isinstance(message, Fault):
            self._fail(message.id, RequestError(message.code, message.error, message.category))
            if message.ends:
                self._give_up(message.error)
        elif not self._waiting[1].done():
            self._waiting[1].set_result(message)

    def _fail(self, name: str, error: RequestError) -> None:
        if self._waiting is not None and self._waiting[0] == name and not self._waiting[1].done():
            self._waiting[1].set_exception(error)
