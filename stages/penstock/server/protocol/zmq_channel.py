"""Channels between processes, over ZeroMQ.

One end listens (ROUTER) and speaks with one peer at a time, the last that said something; the other
connects (DEALER), again and again. A frame that is no message is dropped with a line in the log.
With a secret both ends are encrypted (CURVE), and who does not know it is not heard.

Messages that are sent before the loss of the peer is heard of are lost with it. The end that
connects keeps those that are sent later for the next peer; the end that listens has nobody to send
them to, and drops them.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from penstock.core.errors import StageError
from penstock.server.protocol.codec import MAX_BYTES, Codec, FrameError, PeerLostError

LOG = logging.getLogger(__name__)

HIGH_WATER = 128
"""Messages that wait in a socket before its sender does."""
OVERHEAD = 1024
"""Bytes that encryption may add to a frame."""
LINGER_MS = 500
"""How long a closed end still sends what it was handed."""
RETRY_MS, LONGEST_RETRY_MS = 50, 1000
PING_MS, DEAD_AFTER_MS = 2000, 10_000
"""How often a peer that is silent is asked whether it lives, and how long it may leave that
unanswered: of one that dies the system tells at once, of a machine that is cut off it does not."""
FULL_SECONDS = 0.01
"""Between two tries to send to a peer that is behind."""
LARGE = 1 << 22
"""Bytes of a frame from which on it is not copied."""

WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

Sent = TypeVar("Sent")
Heard = TypeVar("Heard")


class ZmqChannel(Generic[Sent, Heard]):
    """One end; `listening` and `connecting` make it. To be made and used in one event loop."""

    def __init__(self, socket: "zmq.asyncio.Socket", heard: Any) -> None:
        """`heard`: the union of the messages that arrive here."""
        self._socket = socket
        self._heard: Codec[Heard] = Codec(heard)
        self._sent: Codec[Sent] = Codec(Any)
        self._routes = socket.type == zmq.ROUTER
        self._monitor = socket.get_monitor_socket(WATCHED)
        self._peer: bytes | None = None
        self._descriptor = -1
        self._left: set[int] = set()
        self._there = asyncio.Event()
        self._lost = 0
        self._lost_and_heard_of = 0
        self._news = asyncio.Event()
        self._refusals = 0
        self._closed = False
        self._watching: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Where the socket is bound, or connects to, with the port that it has."""
        return self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def begin(self, *, bind: str | None = None, connect: str | None = None) -> None:
        """Listen there, or connect to there. Raises StageError where nobody can listen."""
        self._watching = asyncio.create_task(self._watch())
        try:
            if bind is not None:
                self._socket.bind(bind)
            if connect is not None:
                self._socket.connect(connect)
        except zmq.ZMQError as error:
            self.close()
            raise StageError(
                f"{bind or connect} is no address to speak at here: {error}.\n"
                "  Another server may listen there; name another port or host."
            ) from error

    async def send(self, message: Sent) -> None:
        """Hand the message over; waits while the peer is behind."""
        frame = self._sent.frame_of(message)
        lost = self._lost
        if lost != self._lost_and_heard_of:
            return
        while not self._closed:
            if not self._routes:
                await self._there.wait()
            peer = self._peer
            if self._closed or self._lost != lost or (self._routes and peer is None):
                return
            parts = [frame] if peer is None else [peer, frame]
            try:
                await self._hand_over(parts, is_large=len(frame) >= LARGE)
            except zmq.Again:
                await asyncio.sleep(FULL_SECONDS)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return
            else:
                return

    async def _hand_over(self, parts: list[Any], *, is_large: bool) -> None:
        """To the socket. A large frame is not copied, and is waited for until it is sent, so that
        whoever sends many of them does not hold them all."""
        if not is_large:
            await self._socket.send_multipart(parts, zmq.NOBLOCK)
            return
        sent = await self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False, track=True)
        while sent is not None and not sent.done and not self._closed:
            await asyncio.sleep(FULL_SECONDS)

    async def receive(self) -> Heard:
        """The next message. Raises PeerLostError once whenever the peer is gone."""
        while True:
            parts = await self._arrived()
            if parts is None:
                self._lost_and_heard_of = self._lost
                raise PeerLostError(f"the process at the other end of {self.address} is gone")
            await self._take_notes()
            message = self._read(parts)
            if message is not None:
                return message

    def close(self) -> None:
        """Close the socket; what it was handed is sent for a moment yet."""
        if self._closed:
            return
        self._closed = True
        self._there.set()
        if self._watching is not None:
            self._watching.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=LINGER_MS)

    async def _arrived(self) -> list[zmq.Frame] | None:
        """The next frames, or None for a loss that was not heard of yet: what a peer said before it
        died comes first."""
        while True:
            self._news.clear()
            with suppress(zmq.Again):
                return await self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if self._lost != self._lost_and_heard_of:
                return None
            news = asyncio.ensure_future(self._news.wait())
            readable = asyncio.ensure_future(self._socket.poll())
            try:
                await asyncio.wait({news, readable}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
                readable.cancel()

    def _read(self, parts: list[zmq.Frame]) -> Heard | None:
        body = parts[-1]
        if len(parts) != (2 if self._routes else 1):
            LOG.warning("dropped a message of %d frames; one is wanted", len(parts) - self._routes)
            return None
        try:
            message = self._heard.decode(body.buffer)
        except FrameError as error:
            LOG.warning("dropped a frame of %d bytes: %s", len(body.buffer), error)
            return None
        if self._routes:
            # Any process may say nonsense; the one that knows the language is answered.
            self._peer, self._descriptor = parts[0].bytes, int(body.get(zmq.SRCFD))
            if self._descriptor in self._left:
                self._lose()
        return message

    async def _watch(self) -> None:
        while True:
            await self._monitor.poll()
            await self._take_notes()

    async def _take_notes(self) -> None:
        """Note all that has happened, so that a message is not taken for that of a process which
        had its descriptor before. Nothing else reads what happens, or it would be noted in another
        order."""
        with suppress(zmq.Again):
            while True:
                self._note(await recv_monitor_message(self._monitor, zmq.NOBLOCK))

    def _note(self, happened: Mapping[str, Any]) -> None:
        event, value = happened["event"], happened["value"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._there.set()
        elif event == zmq.EVENT_ACCEPTED:
            self._left.discard(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._left.add(value)
            if self._descriptor == value if self._routes else self._there.is_set():
                self._lose()
        elif self._routes:
            self._refusals += 1
            if self._refusals == 1:
                LOG.warning("refused a process that does not know the secret of %s", self.address)

    def _lose(self) -> None:
        self._peer, self._descriptor = None, -1
        self._there.clear()
        self._lost += 1
        self._news.set()


def listening(heard: Any, address: str, secret: str | None = None) -> "ZmqChannel[Any, Any]":
    """The end that others connect to; `tcp://127.0.0.1:*` takes a free port.

    `heard`: the union of the messages that arrive. Raises StageError where the address is taken.
    """
    socket = _socket(zmq.ROUTER, address)
    socket.router_mandatory = True
    if secret is not None:
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = _keys(secret)
    channel: ZmqChannel[Any, Any] = ZmqChannel(socket, heard)
    channel.begin(bind=address)
    return channel


def connecting(heard: Any, address: str, secret: str | None = None) -> "ZmqChannel[Any, Any]":
    """The end that connects to another, whenever that is there.

    `heard`: the union of the messages that arrive.
    """
    socket = _socket(zmq.DEALER, address)
    socket.immediate = True
    socket.reconnect_ivl, socket.reconnect_ivl_max = RETRY_MS, LONGEST_RETRY_MS
    if secret is not None:
        # What the listener's key is, only those know who know the secret: that admits them.
        socket.curve_serverkey = _keys(secret)[1]
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    channel: ZmqChannel[Any, Any] = ZmqChannel(socket, heard)
    channel.begin(connect=address)
    return channel


def _socket(kind: int, address: str) -> "zmq.asyncio.Socket":
    socket = zmq.asyncio.Context.instance().socket(kind)
    socket.ipv6 = "[" in address
    socket.maxmsgsize = MAX_BYTES + OVERHEAD
    socket.sndhwm = socket.rcvhwm = HIGH_WATER
    socket.heartbeat_ivl, socket.heartbeat_timeout = PING_MS, DEAD_AFTER_MS
    return socket


def _keys(secret: str) -> tuple[bytes, bytes]:
    """The listener's secret key and its public one, which only those can tell who know the
    first."""
    key = z85.encode(bytes.fromhex(secret))
    return key, zmq.curve_public(key)
