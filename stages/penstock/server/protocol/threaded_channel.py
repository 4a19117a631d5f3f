"""Channel with its own I/O thread, for a process whose main thread computes. While the main thread
runs a command, the I/O thread receives messages and sends a heartbeat every second."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, wait
from contextlib import suppress
from typing import Any, Generic, TypeVar

from penstock.server.protocol.codec import Channel, PeerLostError

HEARTBEAT_SECONDS = 1.0
CHECK_SECONDS = 1.0  # Seconds between checks that the I/O thread is alive
CLOSE_SECONDS = 5.0  # Seconds that a closing end waits for outgoing messages

SentT = TypeVar("SentT")
ReceivedT = TypeVar("ReceivedT")


class ThreadedEnd(Generic[SentT, ReceivedT]):
    """One end of a channel, usable from several threads. Must be closed."""

    def __init__(
        self,
        open_channel: Callable[[], Channel[Any, Any]],
        heartbeat: Callable[[], SentT] | None = None,
        interval: float = HEARTBEAT_SECONDS,
    ) -> None:
        """`open_channel` creates the channel in the I/O thread; `heartbeat` returns the message
        that is sent every `interval` seconds. Raises the errors of `open_channel`."""
        self._open_channel = open_channel
        self._heartbeat = heartbeat
        self._interval = interval
        self._received: queue.Queue[ReceivedT | Exception] = queue.Queue()
        self._loop = asyncio.new_event_loop()
        self._channel: Channel[Any, Any] | None = None
        self._start_error: Exception | None = None
        self._ready = threading.Event()
        # Created in another thread: it belongs to the loop that waits for it first (Python 3.10).
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-channel", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._start_error is not None:
            self._thread.join()
            raise self._start_error

    def receive(self, timeout: float | None = None) -> ReceivedT | None:
        """Receive the next message; None if there is none within `timeout` seconds. Raises
        PeerLostError once per loss of the peer."""
        try:
            message = self._received.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(message, Exception):
            raise message
        return message

    def send(self, message: SentT) -> None:
        """Send the message, from any thread; blocks while the peer is behind. Raises FrameError for
        a message that is too large."""
        if self._channel is None or self._closing.is_set() or not self._thread.is_alive():
            return
        sending = asyncio.run_coroutine_threadsafe(self._channel.send(message), self._loop)
        # Not `result()`: a future of a loop that has ended is never done.
        while self._thread.is_alive() and not wait([sending], CHECK_SECONDS).done:
            continue
        with suppress(CancelledError):
            if sending.done():
                sending.result()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        try:
            self._channel = self._open_channel()
        except Exception as error:  # noqa: BLE001 - re-raised in the main thread
            self._start_error = error
            return
        finally:
            self._ready.set()
        channel, heartbeat = self._channel, self._heartbeat

        async def receive_loop() -> None:
            while True:
                try:
                    self._received.put(await channel.receive())
                except PeerLostError as error:
                    self._received.put(error)

        async def heartbeat_loop(message: Callable[[], SentT]) -> None:
            while True:
                await asyncio.sleep(self._interval)
                await channel.send(message())

        tasks = [asyncio.create_task(receive_loop())]
        if heartbeat is not None:
            tasks.append(asyncio.create_task(heartbeat_loop(heartbeat)))
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait({closing, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in (closing, *tasks):
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                # Otherwise a waiting receiver would block forever.
                self._received.put(outcome)
        channel.close()
