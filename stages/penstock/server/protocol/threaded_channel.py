"""Channel with its own I/O thread, for a process whose main thread computes.

While the main thread runs a command, the I/O thread receives messages and sends a heartbeat every
second.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, wait
from contextlib import suppress
from typing import Any, Generic, TypeVar

from penstock.server.protocol.codec import Channel, PeerLostError

BEAT_SECONDS = 1.0
LOOK_SECONDS = 1.0
"""Seconds between checks that the I/O thread is alive."""
CLOSE_SECONDS = 5.0
"""Seconds that a closing end waits for outgoing messages."""

Sent = TypeVar("Sent")
Heard = TypeVar("Heard")


class ThreadedEnd(Generic[Sent, Heard]):
    """One end of a channel, usable from several threads. Must be closed."""

    def __init__(
        self,
        begin: Callable[[], Channel[Any, Any]],
        beat: Callable[[], Sent] | None = None,
        seconds: float = BEAT_SECONDS,
    ) -> None:
        """`begin` creates the channel in the I/O thread; `beat` returns the heartbeat sent every
        `seconds`. Raises the errors of `begin`."""
        self._begin = begin
        self._beat = beat
        self._seconds = seconds
        self._arrived: queue.Queue[Heard | Exception] = queue.Queue()
        self._loop = asyncio.new_event_loop()
        self._channel: Channel[Any, Any] | None = None
        self._fault: Exception | None = None
        self._ready = threading.Event()
        self._leaving = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-channel", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._fault is not None:
            self._thread.join()
            raise self._fault

    def receive(self, timeout: float | None = None) -> Heard | None:
        """Receive the next message; None if there is none within `timeout` seconds.

        Raises PeerLostError once per loss of the peer.
        """
        try:
            got = self._arrived.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(got, Exception):
            raise got
        return got

    def send(self, message: Sent) -> None:
        """Send the message, from any thread; blocks while the peer is behind.

        Raises FrameError for a message that is too large.
        """
        if self._channel is None or self._leaving.is_set() or not self._thread.is_alive():
            return
        going = asyncio.run_coroutine_threadsafe(self._channel.send(message), self._loop)
        while self._thread.is_alive() and not wait([going], LOOK_SECONDS).done:
            continue
        with suppress(CancelledError):
            if going.done():
                going.result()

    def close(self) -> None:
        """Close the channel and stop the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._leaving.set)
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        try:
            self._channel = self._begin()
        except Exception as error:  # noqa: BLE001 - re-raised in the main thread
            self._fault = error
            return
        finally:
            self._ready.set()
        tasks = [asyncio.create_task(self._listen(self._channel))]
        if self._beat is not None:
            tasks.append(asyncio.create_task(self._tell(self._channel, self._beat)))
        leaving = asyncio.create_task(self._leaving.wait())
        await asyncio.wait({leaving, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in (leaving, *tasks):
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                # Otherwise a waiting receiver would block forever.
                self._arrived.put(outcome)
        self._channel.close()

    async def _listen(self, channel: Channel[Any, Any]) -> None:
        while True:
            try:
                self._arrived.put(await channel.receive())
            except PeerLostError as error:
                self._arrived.put(error)

    async def _tell(self, channel: Channel[Any, Any], beat: Callable[[], Sent]) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            await channel.send(beat())
