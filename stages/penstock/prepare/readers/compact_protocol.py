"""Decode Thrift's compact protocol, in which Parquet writes its footer and the headers of pages."""

from typing import Any

# Each level is a call in Python: damaged bytes could nest up to its limit of recursion.
MAX_DEPTH = 16
"""Of structures and lists."""

Struct = dict[int, Any]
"""Fields of a structure by number. A text is its length, and so is a list of anything but
structures."""


class CompactReader:
    """Thrift's compact protocol. Raises IndexError where the content ends."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.at = 0

    def varint(self) -> int:
        """An unsigned number."""
        number = shift = 0
        while True:
            byte = self._content[self.at]
            self.at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def struct(self, depth: int = 0) -> Struct:
        """A structure."""
        fields, number = Struct(), 0
        while header := self._byte():
            delta, kind = header >> 4, header & 0xF
            # Fields in ascending order are written as differences of 1 to 15, others with their
            # number.
            number = number + delta if delta else self._signed()
            # Of a field, 1 and 2 are true and false themselves; in a list they take a byte.
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        if kind in (1, 2, 3):
            return self._byte()
        # Integers of 16, 32 and 64 bits; 7 is a double, 8 a text or bytes, 9 a list, 10 a set, 12 a
        # structure. Parquet has no maps (11).
        if kind in (4, 5, 6):
            return self._signed()
        if kind == 7:
            return self._skip(8)
        if kind == 8:
            return self._skip(self.varint())
        if kind in (9, 10):
            header = self._byte()
            # Up to 14 entries are counted in the header.
            count = header >> 4 if header < 0xF0 else self.varint()
            # A false count costs little: every entry takes a byte, so it ends with the content.
            values = [self._value(header & 0xF, depth + 1) for _ in range(count)]
            return values if header & 0xF == 12 else count
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError(f"type {kind}")

    def _byte(self) -> int:
        self.at += 1
        return self._content[self.at - 1]

    def _signed(self) -> int:
        number = self.varint()
        # Zigzag: 0, -1, 1, -2 are written as 0, 1, 2, 3.
        return (number >> 1) ^ -(number & 1)

    def _skip(self, count: int) -> int:
        self.at += count
        if self.at > len(self._content):
            raise IndexError
        return count
