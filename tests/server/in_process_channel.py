"""A channel within one process: a server and its engine in a test.

Messages are encoded and decoded as between processes, so the receiver never sees later changes, and
an invalid message raises FrameError at the sender.
"""

import asyncio
from typing import Any, Generic, Literal, TypeVar

from penstock.server.protocol.codec import Codec, PeerLostError

Sent = TypeVar("Sent")
Heard = TypeVar("Heard")


class MemoryEnd(Generic[Sent, Heard]):
    """One end of a pair."""

    def __init__(self, heard: Any, kind: Literal["connects", "listens"]) -> None:
        """`heard`: the union of the received message types. The connecting end buffers messages
        while there is no peer, as ZeroMQ does; the listening end drops them."""
        self._codec: Codec[Any] = Codec(heard)
        self._keeps = kind == "connects"
        self._kept: list[Any] = []
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()
        self._unheard = 0
        self._other: MemoryEnd[Any, Any] | None = None

    @property
    def queued(self) -> int:
        """Messages that have arrived and are not received."""
        return self._arrived.qsize()

    async def send(self, message: Sent) -> None:
        """Send the message; it is lost if the other end was dropped."""
        if self._other is not None:
            self._other._put(message)
        elif self._keeps and not self._unheard:
            self._kept.append(message)

    async def receive(self) -> Heard:
        """Receive the next message. Raises PeerLostError once after the peer was dropped."""
        frame = await self._arrived.get()
        if frame is None:
            self._unheard -= 1
            raise PeerLostError("the process at the other end is gone")
        return self._codec.decode(frame)

    def join(self, other: "MemoryEnd[Any, Any]") -> None:
        """Connect to a new peer, which replaces the previous one."""
        for one in (self, other):
            one.drop()
        self._other, other._other = other, self
        for one, peer in ((self, other), (other, self)):
            kept, one._kept = one._kept, []
            for message in kept:
                peer._put(message)

    def drop(self) -> None:
        """Simulate the death of this process: the peer is notified, and so is this end, if it is
        used further, as if the peer had died."""
        peer, self._other = self._other, None
        if peer is not None:
            peer._other = None
            for one in (self, peer):
                one._unheard += 1
                one._arrived.put_nowait(None)

    def close(self) -> None:
        """Drop this end."""
        self.drop()

    def _put(self, message: Any) -> None:
        frame = self._codec.encode_frame(message)
        self._codec.decode(frame)
        self._arrived.put_nowait(frame)


def memory_pair(ours: Any, theirs: Any) -> tuple[MemoryEnd[Any, Any], MemoryEnd[Any, Any]]:
    """Two ends: the first one connects, sends messages of the union `ours` and receives those of
    `theirs`; the second one listens."""
    first: MemoryEnd[Any, Any] = MemoryEnd(theirs, "connects")
    second: MemoryEnd[Any, Any] = MemoryEnd(ours, "listens")
    first.join(second)
    return first, second
