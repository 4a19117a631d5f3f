"""What two processes of the server see of the wire between them."""

from typing import Protocol, TypeVar

Sent_contra = TypeVar("Sent_contra", contravariant=True)
Heard_co = TypeVar("Heard_co", covariant=True)


class PeerLostError(ConnectionError):
    """The process at the other end is gone. It may come again: the channel stays open."""


class Channel(Protocol[Sent_contra, Heard_co]):
    """One end. Messages arrive in order, or the loss of the peer is heard of between them."""

    async def send(self, message: Sent_contra) -> None:
        """Hand the message over; it is lost where the peer is."""
        ...

    async def receive(self) -> Heard_co:
        """The next message. Raises PeerLostError once whenever the peer is gone."""
        ...

    def close(self) -> None:
        """Nothing is sent or heard any more."""
        ...
