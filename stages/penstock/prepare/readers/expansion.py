"""How far the content of a file may exceed its bytes.

Compression, dictionaries and runs let a few bytes stand for any amount of data, whose reading would
not end.
"""

from dataclasses import dataclass

from penstock.core.errors import StageError

# Bytes of content for each byte of a file; texts are compressed to a tenth.
RATIO = 1000

FLOOR = 256 << 20
"""Bytes of content that any file may have."""


@dataclass
class Expansion:
    """Bytes of content that were read from a file, or are about to be."""

    name: str
    file_bytes: int | None
    """Size of the file; None if not known, which is no limit."""
    total: int = 0

    @property
    def limit(self) -> float:
        """Largest content of the file, in bytes."""
        return float("inf") if self.file_bytes is None else max(FLOOR, RATIO * self.file_bytes)

    def add(self, num_bytes: int) -> None:
        """Count bytes of content. Raises StageError if they are too many."""
        self.total += num_bytes
        self.check(self.total, "content so far")

    def check(self, num_bytes: int, part: str) -> None:
        """Raise StageError if `part` has too many bytes."""
        if num_bytes > self.limit:
            raise StageError(
                f"{self.name} has {self.file_bytes:,} bytes, and {num_bytes:,} bytes of {part}: "
                f"more than {RATIO:,} times as many.\n"
                "  It is damaged or made to fill memory; if not, write it without compression and "
                "dictionaries."
            )
