"""Messages to frames of bytes and back: msgpack, checked against the types. Never pickle."""

from typing import Any, Generic, TypeVar

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
