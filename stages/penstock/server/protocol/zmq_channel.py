"""Interprocess channels over ZeroMQ.

One end listens (ROUTER) and talks to one peer at a time, the last one that sent a message; the
other end connects (DEALER) and reconnects. Invalid messages are dropped and logged. With a secret,
both ends encrypt (CURVE) and reject peers without the secret. A large message is several frames, so
that only one of them is copied to be encrypted.

Messages sent before the loss of the peer is detected are lost. Messages sent later are buffered for
the next peer by the connecting end, and dropped by the listening end.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from penstock.core.errors import StageError
from penstock.server.protocol.codec import MAX_BYTES, Codec, FrameError, PeerLostError

LOG = logging.getLogger(__name__)

HIGH_WATER_MARK = 128  # High-water mark: messages queued in a socket before send blocks
OVERHEAD = 1024  # Maximum bytes that encryption adds to a frame
LINGER_MS = 500  # Milliseconds that a closed end continues to send
RETRY_MS, MAX_RETRY_MS = 50, 1000
# Heartbeat interval and timeout in milliseconds, also of a message in flight. The operating system
# reports a dead process at once, but not an unreachable machine.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2000, 10_000
RETRY_SEND_SECONDS = 0.01  # Seconds between tries to send to a peer that is behind
# Maximum bytes of a frame of a message. Those of a message of several are sent without a copy.
FRAME_BYTES = 1 << 22

EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

SentT = TypeVar("SentT")
ReceivedT = TypeVar("ReceivedT")


class ZmqChannel(Generic[SentT, ReceivedT]):
    """One end, of `listening` or `connecting`. To be created and used in one event loop."""

    def __init__(self, socket: "zmq.asyncio.Socket", received: Any) -> None:
        """`received`: the union of the received message types."""
        self._socket = socket
        self._received_codec: Codec[ReceivedT] = Codec(received)
        self._sent_codec: Codec[SentT] = Codec(Any)
        self._routes = socket.type == zmq.ROUTER
        self._monitor = socket.get_monitor_socket(EVENTS)
        self._peer: bytes | None = None
        self._descriptor = -1
        self._disconnected: set[int] = set()
        self._connected = asyncio.Event()
        self._num_losses = 0
        self._num_reported_losses = 0
        self._loss_detected = asyncio.Event()
        self._num_rejected = 0
        self._closed = False
        self._watch_task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """The address that the socket is bound or connected to, with its actual port."""
        return self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def open(self, attach: Callable[[str], Any], address: str) -> None:
        """`attach` binds or connects the socket. Raises StageError if it cannot."""
        self._watch_task = asyncio.create_task(self._watch_events())
        try:
            attach(address)
        except zmq.ZMQError as error:
            self.close()
            raise StageError(
                f"{address} cannot be used as an address here: {error}.\n"
                "  Another server may listen there; name another port or host."
            ) from error

    async def send(self, message: SentT) -> None:
        """Send the message; waits while the peer is behind."""
        frame = self._sent_codec.encode_frame(message)
        losses_before = self._num_losses
        # Whoever sends does not know of the loss yet: this is for the peer that is gone.
        if losses_before != self._num_reported_losses:
            return
        while not self._closed:
            if not self._routes:
                await self._connected.wait()
            peer = self._peer
            if self._closed or self._num_losses != losses_before or (self._routes and peer is None):
                return
            frames = _split(frame)
            try:
                parts = frames if peer is None else [peer, *frames]
                await self._send_frames(parts, is_large=len(frames) > 1)
            except zmq.Again:
                await asyncio.sleep(RETRY_SEND_SECONDS)
            except zmq.ZMQError as error:
                # What a ROUTER raises for a peer that is gone (router_mandatory).
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return
            else:
                return

    async def _send_frames(self, parts: list[Any], *, is_large: bool) -> None:
        """Pass the frames to the socket. Those of a large message are not copied and are awaited,
        so that the sender does not hold many of them in memory; not beyond a loss of the peer."""
        losses_before = self._num_losses
        if not is_large:
            await self._socket.send_multipart(parts, zmq.NOBLOCK)
            return
        sent = await self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False, track=True)
        while (
            sent is not None
            and not sent.done
            and not self._closed
            and self._num_losses == losses_before
        ):
            await asyncio.sleep(RETRY_SEND_SECONDS)

    async def receive(self) -> ReceivedT:
        """Receive the next message. Raises PeerLostError once per loss of the peer."""
        while True:
            parts = await self._next_frames()
            if parts is None:
                self._num_reported_losses = self._num_losses
                raise PeerLostError(f"the process at the other end of {self.address} is gone")
            await self._process_events()
            message = self._decode(parts)
            if message is not None:
                return message

    def close(self) -> None:
        """Close the socket; queued messages are sent within LINGER_MS."""
        if self._closed:
            return
        self._closed = True
        self._connected.set()
        if self._watch_task is not None:
            self._watch_task.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=LINGER_MS)

    async def _next_frames(self) -> list[zmq.Frame] | None:
        """The next frames, or None for a newly detected loss; messages that the peer sent before it
        died come first."""
        while True:
            self._loss_detected.clear()
            with suppress(zmq.Again):
                return await self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if self._num_losses != self._num_reported_losses:
                return None
            loss = asyncio.ensure_future(self._loss_detected.wait())
            readable = asyncio.ensure_future(self._socket.poll())
            try:
                await asyncio.wait({loss, readable}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                loss.cancel()
                readable.cancel()

    def _decode(self, parts: list[zmq.Frame]) -> ReceivedT | None:
        peer = parts.pop(0).bytes if self._routes else None
        descriptor = int(parts[-1].get(zmq.SRCFD)) if parts else -1
        # `maxmsgsize` limits each frame, and a peer may send any number of them.
        num_bytes = sum(len(part.buffer) for part in parts)
        if num_bytes > MAX_BYTES:
            LOG.warning("dropped a message of %d bytes; %d may be", num_bytes, MAX_BYTES)
            return None
        try:
            message = self._received_codec.decode(_join(parts, num_bytes))
        except FrameError as error:
            LOG.warning("dropped a message of %d bytes: %s", num_bytes, error)
            return None
        if self._routes:
            # Accept only a peer that sends valid messages; the last one is the peer.
            self._peer, self._descriptor = peer, descriptor
            if self._descriptor in self._disconnected:
                self._mark_lost()
        return message

    async def _watch_events(self) -> None:
        while True:
            await self._monitor.poll()
            await self._process_events()

    async def _process_events(self) -> None:
        """Process all socket monitor events, so that a message is not attributed to a process that
        used the same descriptor before. Nothing else reads the events, which would change their
        order."""
        with suppress(zmq.Again):
            while True:
                self._process_event(await recv_monitor_message(self._monitor, zmq.NOBLOCK))

    def _process_event(self, monitor_event: Mapping[str, Any]) -> None:
        event, value = monitor_event["event"], monitor_event["value"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected.set()
        elif event == zmq.EVENT_ACCEPTED:
            # A new connection gets the lowest free descriptor, often that of the last one.
            self._disconnected.discard(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._disconnected.add(value)
            # Of a listener's connections only one is the peer's; a connecting end has no other.
            if self._descriptor == value if self._routes else self._connected.is_set():
                self._mark_lost()
        elif self._routes:
            self._num_rejected += 1
            if self._num_rejected == 1:
                LOG.warning("refused a process that does not know the secret of %s", self.address)

    def _mark_lost(self) -> None:
        self._peer, self._descriptor = None, -1
        self._connected.clear()
        self._num_losses += 1
        self._loss_detected.set()


def listening(received: Any, address: str, secret: str | None = None) -> "ZmqChannel[Any, Any]":
    """The listening end; `tcp://127.0.0.1:*` binds a free port. `received`: the union of the
    received message types. Raises StageError if the address is in use."""
    socket = _socket(zmq.ROUTER, address)
    # By default a ROUTER drops messages to unknown peers without an error.
    socket.router_mandatory = True
    if secret is not None:
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = _keys(secret)
    channel: ZmqChannel[Any, Any] = ZmqChannel(socket, received)
    channel.open(socket.bind, address)
    return channel


def connecting(received: Any, address: str, secret: str | None = None) -> "ZmqChannel[Any, Any]":
    """The connecting end; the listener need not exist yet. `received`: as above."""
    socket = _socket(zmq.DEALER, address)
    # By default messages are queued for a connection that is not there yet, and may be lost.
    socket.immediate = True
    socket.reconnect_ivl, socket.reconnect_ivl_max = RETRY_MS, MAX_RETRY_MS
    if secret is not None:
        # The server key is derived from the secret, so knowing it authenticates the peer.
        socket.curve_serverkey = _keys(secret)[1]
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    channel: ZmqChannel[Any, Any] = ZmqChannel(socket, received)
    channel.open(socket.connect, address)
    return channel


def _socket(kind: int, address: str) -> "zmq.asyncio.Socket":
    socket = zmq.asyncio.Context.instance().socket(kind)
    socket.ipv6 = "[" in address
    # Of one frame. A peer that sends a larger one is disconnected before it is received.
    socket.maxmsgsize = FRAME_BYTES + OVERHEAD
    socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
    socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
    # While a large frame is in flight no heartbeat is sent; the kernel times its bytes instead.
    socket.tcp_maxrt = HEARTBEAT_TIMEOUT_MS
    return socket


def _split(message: bytes | bytearray | memoryview) -> list[Any]:
    """The frames of a message, about equally large: a small one would be copied, and so count as
    sent at once."""
    view = memoryview(message)
    count = max(1, math.ceil(len(view) / FRAME_BYTES))
    frame_bytes = math.ceil(len(view) / count)
    return [view[index * frame_bytes : (index + 1) * frame_bytes] for index in range(count)]


def _join(frames: list[zmq.Frame], num_bytes: int) -> memoryview:
    """The message of these frames, each of which is freed once it is copied."""
    if len(frames) == 1:
        return frames[0].buffer
    message = memoryview(bytearray(num_bytes))
    offset = 0
    for index, frame in enumerate(frames):
        message[offset : offset + len(frame.buffer)] = frame.buffer
        offset += len(frame.buffer)
        frames[index] = None  # pyright: ignore[reportArgumentType, reportCallIssue]
    return message


def _keys(secret: str) -> tuple[bytes, bytes]:
    """The listener's secret and public keys, derived from the secret."""
    # CURVE keys are 32 bytes, which ZeroMQ's options take in the text encoding Z85.
    key = z85.encode(bytes.fromhex(secret))
    return key, zmq.curve_public(key)
