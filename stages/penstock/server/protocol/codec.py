"""Messages to frames of bytes and back: msgpack, checked against the types. Never pickle."""

from typing import Any, Generic, Literal, Protocol, TypeVar, dataclass_transform

import msgspec

MAX_BYTES = 1 << 30
"""Of one frame."""

M = TypeVar("M")


class Encoded(msgspec.Struct, frozen=True):
    """A message that another process has encoded: it is sent as it is."""

    frame: bytes | bytearray | memoryview


class FrameError(ValueError):
    """A frame that is no message of the kind that is read here."""


class Codec(Generic[M]):
    """The messages of one direction of one channel."""

    def __init__(self, messages: Any) -> None:
        """`messages`: the union of their types."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages)

    def encode(self, message: M) -> bytes:
        """Raises FrameError for one of more than MAX_BYTES, or with a number or a text that msgpack
        does not hold."""
        try:
            frame = self._encoder.encode(message)
        except (OverflowError, UnicodeEncodeError) as error:
            raise FrameError(f"a message cannot be sent: {error}") from error
        _require_fits(frame)
        return frame

    def frame_of(self, message: M | Encoded) -> bytes | bytearray | memoryview:
        """The same, and of a message that is encoded already its bytes. Raises FrameError."""
        if isinstance(message, Encoded):
            _require_fits(message.frame)
            return message.frame
        return self.encode(message)

    def decode(self, frame: bytes | bytearray | memoryview) -> M:
        """Raises FrameError for what is no such message."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise FrameError(str(error)) from error


def _require_fits(frame: bytes | bytearray | memoryview) -> None:
    if len(frame) > MAX_BYTES:
        raise FrameError(
            f"a message of {len(frame)} bytes is over the limit of {MAX_BYTES}.\n"
            "  Send fewer samples at once."
        )


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


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One that travels by itself, or within another: its name goes with it."""


Category = Literal["user", "server", "unknown"]
"""Who can do something about a failure."""

Code = Literal[
    "invalid",  # 400
    "not_found",  # 404
    "exists",  # 409
    "gone",  # 410
    "busy",  # 429
    "storage_limit",  # 507
    "not_finite",  # of numbers that were computed
    "cancelled",
    "lost",  # the processes that did it died
    "unavailable",  # 503
    "internal",  # 500
]
"""What kind of failure it is; with the HTTP status of calls that are answered at once."""

OURS: frozenset[Code] = frozenset({"lost", "unavailable", "internal"})
"""Kinds of failure that no client can do anything about."""


def error_category(code: Code) -> Category:
    """Who can do something about it."""
    return "server" if code in OURS else "user"
