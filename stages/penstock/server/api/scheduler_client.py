"""Scheduler client: the API's end of the channel to the scheduler."""

import asyncio
import logging
import secrets
import time

from penstock.server.api.errors import ApiError
from penstock.server.protocol.codec import Channel, Encoded, FrameError, PeerLostError
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
from penstock.server.protocol.requests import Operation
from penstock.server.protocol.results import Result

LOG = logging.getLogger(__name__)

HELLO_SECONDS = 1.0  # Seconds between hello messages until the scheduler answers
LOST = "the scheduler died while this was running; what it had done is unknown. Send it again."

AnyResponse = Response | Failure


class SchedulerClient:
    """Requests of this process that are in flight."""

    def __init__(self, channel: Channel[ToScheduler | Encoded, FromScheduler]) -> None:
        self._channel = channel
        self._waiting: dict[str, asyncio.Future[AnyResponse]] = {}
        self._instance = secrets.token_hex(8)
        self._greeted = ""
        self.status: Status | None = None
        """None until the scheduler is connected and after the connection is lost."""

    def close(self) -> None:
        """Close the channel; requests in flight fail."""
        self._fail_all("the server stops; send it again once it is back")
        self._channel.close()

    async def submit(self, request: Request) -> asyncio.Future[AnyResponse]:
        """Send a request and return a future of its result. Raises ApiError as `expect` and
        `send`."""
        response = self.expect(request.id)
        await self.send(request, request.id)
        return response

    def expect(self, name: str) -> asyncio.Future[AnyResponse]:
        """Register a request. Raises ApiError (503) if the scheduler is not connected."""
        if self.status is None or self._greeted != self._instance:
            raise ApiError(
                "the scheduler is not connected; it is being restarted", code="unavailable"
            )
        response: asyncio.Future[AnyResponse] = asyncio.get_running_loop().create_future()
        self._waiting[name] = response
        response.add_done_callback(lambda _: self._waiting.pop(name, None))
        return response

    async def send(self, request: Request | Encoded, name: str) -> None:
        """Send a registered request; if sending fails, its future is cancelled. Raises ApiError
        (413) for a message that is too large for the channel."""
        response = self._waiting[name]
        try:
            await self._channel.send(request)
        # Also CancelledError: the client has gone, and nobody would take the response.
        except BaseException as error:
            response.cancel()
            if isinstance(error, FrameError):
                raise ApiError(str(error), status=413) from error
            raise

    async def call(self, owner: str, operation: Operation, seconds: float) -> Result:
        """Send a request and wait for its result. Raises ApiError: the scheduler's error, or 504
        after `seconds`; the request is then cancelled unless it has started."""
        request = Request(id=secrets.token_hex(16), owner=owner, operation=operation)
        response = await self.submit(request)
        try:
            # On timeout, wait_for cancels the response, which takes it out of `_waiting`.
            reply = await asyncio.wait_for(response, seconds)
        except TimeoutError:
            await self.cancel(request.id)
            raise ApiError(
                f"the server has not done it within {seconds:g} s; ask again later",
                status=504,
                code="unavailable",
            ) from None
        if isinstance(reply, Failure):
            raise ApiError(reply.error, code=reply.code, category=reply.category)
        return reply.result

    async def cancel(self, name: str) -> None:
        await self._channel.send(Cancel(id=name))

    async def listen(self) -> None:
        while True:
            try:
                message = await self._channel.receive()
            except PeerLostError:
                self._on_peer_lost()
                continue
            match message:
                case Status():
                    if self.status is None or self.status.workers != message.workers:
                        LOG.info("the workers are %s %s", message.workers, message.reason)
                    self.status = message
                case Response() | Failure():
                    response = self._waiting.get(message.id)
                    if response and not response.done():
                        response.set_result(message)

    def _on_peer_lost(self) -> None:
        if self.status is not None:
            LOG.warning("the scheduler is lost, with %d requests in flight", len(self._waiting))
        self.status = None
        # A new instance name: requests that this process counted as done may be unknown to a new
        # scheduler.
        self._instance = secrets.token_hex(8)
        self._fail_all(LOST)

    def _fail_all(self, why: str) -> None:
        for name, response in list(self._waiting.items()):
            if not response.done():
                # As a result: asyncio logs an exception of a future that nobody awaits any more.
                response.set_result(Failure(id=name, error=why, category="server", code="lost"))

    async def greet(self) -> None:
        """Send hello messages until the scheduler sends its status: it may not be running yet."""
        sent_at = 0.0
        while True:
            waits = self.status is None and time.monotonic() - sent_at >= HELLO_SECONDS
            if waits or self._greeted != self._instance:
                # The loss of the scheduler during `send` changes `_instance`.
                sent_at, name = time.monotonic(), self._instance
                await self._channel.send(Hello(instance=name))
                self._greeted = name
            await asyncio.sleep(HELLO_SECONDS / 20)
