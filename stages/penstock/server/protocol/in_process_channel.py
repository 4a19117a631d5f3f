"""Both ends of a channel in one process, for servers of one process and for tests.

Messages are encoded and decoded on their way, as between processes: what one end changes afterwards
the other never sees, and what no process could hear raises FrameError where it is sent.
"""

import asyncio
from typing import Any, Generic, Literal, TypeVar

from penstock.server.protocol.codec import Codec, PeerLostError

Sent = TypeVar("Sent")
Heard = TypeVar("Heard")


class MemoryEnd(Generic[Sent, Heard]):
    """One end of a pair."""

    def __init__(self, heard: Any, kind: Literal["connects", "listens"]) -> None:
        """`heard`: the union of the messages that arrive here. One that connects keeps what it
        sends while nobody is there, as the one of ZeroMQ does; one that listens drops it."""
        self._codec: Codec[Any] = Codec(heard)
        self._keeps = kind == "connects"
        self._kept: list[Any] = []
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()
        self._unheard = 0
        self._other: MemoryEnd[Any, Any] | None = None

    async def send(self, message: Sent) -> None:
        """Hand the message over; it is lost where the other end was dropped."""
        if self._other is not None:
            self._other._put(message)
        elif self._keeps and not self._unheard:
            self._kept.append(message)

    async def receive(self) -> Heard:
        """The next message. Raises PeerLostError once after the peer was dropped."""
        frame = await self._arrived.get()
        if frame is None:
            self._unheard -= 1
            raise PeerLostError("the process at the other end is gone")
        return self._codec.decode(frame)

    def join(self, other: "MemoryEnd[Any, Any]") -> None:
        """Have that one for a peer, which is another process in place of those before."""
        for one in (self, other):
            one.drop()
        self._other, other._other = other, self
        for one, peer in ((self, other), (other, self)):
            kept, one._kept = one._kept, []
            for message in kept:
                peer._put(message)

    def drop(self) -> None:
        """Be a process that dies: the peer hears of it, and so does this end, where somebody goes
        on with it as if the other had died."""
        peer, self._other = self._other, None
        if peer is not None:
            peer._other = None
            for one in (self, peer):
                one._unheard += 1
                one._arrived.put_nowait(None)

    def close(self) -> None:
        """Be dropped."""
        self.drop()

    def _put(self, message: Any) -> None:
        frame = self._codec.frame_of(message)
        self._codec.decode(frame)
        self._arrived.put_nowait(frame)


def memory_pair(ours: Any, theirs: Any) -> tuple[MemoryEnd[Any, Any], MemoryEnd[Any, Any]]:
    """Two ends: the first, which connects, sends messages of the union `ours` and hears those of
    `theirs`; the second listens."""
    first: MemoryEnd[Any, Any] = MemoryEnd(theirs, "connects")
    second: MemoryEnd[Any, Any] = MemoryEnd(ours, "listens")
    first.join(second)
    return first, second
