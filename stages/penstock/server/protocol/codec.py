"""Message codec: msgpack with schema validation. Never pickle."""

from typing import Any, Generic, Literal, Protocol, TypeVar, dataclass_transform

import msgspec

MAX_BYTES = 1 << 30  # Maximum frame size in bytes

M = TypeVar("M")


class Encoded(msgspec.Struct, frozen=True):
    """A message encoded by another process, sent as is."""

    frame: bytes | bytearray | memoryview


class FrameError(ValueError):
    """A frame that is not a valid message of this direction."""


class Codec(Generic[M]):
    """The message types of one direction of one channel."""

    def __init__(self, messages: Any) -> None:
        """`messages`: the union of the message types."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages)

    def encode(self, message: M) -> bytes:
        """Raises FrameError for a message larger than MAX_BYTES, or with a number or string that
        msgpack cannot encode."""
        try:
            frame = self._encoder.encode(message)
        # An integer beyond 64 bits, and a lone surrogate.
        except (OverflowError, UnicodeEncodeError) as error:
            raise FrameError(f"a message cannot be sent: {error}") from error
        _require_fits(frame)
        return frame

    def encode_frame(self, message: M | Encoded) -> bytes | bytearray | memoryview:
        """The same, and the bytes of an already encoded message. Raises FrameError."""
        if isinstance(message, Encoded):
            _require_fits(message.frame)
            return message.frame
        return self.encode(message)

    def decode(self, frame: bytes | bytearray | memoryview) -> M:
        """Raises FrameError for an invalid message."""
        try:
            return self._decoder.decode(frame)
        # msgspec (0.22) raises these two of Python's for deep nesting and for text that is not
        # UTF-8.
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise FrameError(str(error)) from error


def _require_fits(frame: bytes | bytearray | memoryview) -> None:
    if len(frame) > MAX_BYTES:
        raise FrameError(
            f"a message of {len(frame)} bytes is over the limit of {MAX_BYTES}.\n"
            "  Send fewer samples at once."
        )


SentT_contra = TypeVar("SentT_contra", contravariant=True)
ReceivedT_co = TypeVar("ReceivedT_co", covariant=True)


class PeerLostError(ConnectionError):
    """The peer process is gone. It may return: the channel stays open."""


class Channel(Protocol[SentT_contra, ReceivedT_co]):
    """One end of a channel. Messages arrive in order, with the loss of the peer among them."""

    async def send(self, message: SentT_contra) -> None:
        """Send the message; it is lost if the peer is gone."""

    async def receive(self) -> ReceivedT_co:
        """Receive the next message. Raises PeerLostError once per loss of the peer."""
        ...

    def close(self) -> None: ...


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A message, or a tagged part of one."""


Category = Literal["user", "server", "unknown"]  # Who can resolve an error

Code = Literal[
    "invalid",  # 400
    "not_found",  # 404
    "exists",  # 409
    "gone",  # 410
    "busy",  # 429
    "storage_limit",  # 507
    "not_finite",  # computed values
    "cancelled",
    "lost",  # the worker processes died
    "unavailable",  # 503
    "internal",  # 500
]
"""The error code; with the HTTP status of calls that return their result directly."""

OURS: frozenset[Code] = frozenset({"lost", "unavailable", "internal"})
"""Error codes that no client can resolve."""


def error_category(code: Code) -> Category:
    """Who can resolve the error."""
    return "server" if code in OURS else "user"
