"""Records on their way from a source to samples: runs of them, unparsed and parsed.

A record that cannot be read takes its place in the run as the fault that hides it, so that the
caller may count it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.prepare.bad_records import BadRecord, json_type_name

BATCH = 1000
"""Records in a run, at most."""

BATCH_BYTES = 1 << 20
"""Bytes from which on a run is closed, so that long records need no more memory than short ones."""

Value = dict[str, Any] | BadRecord


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Consecutive records of one file (or hub data set), as JSON objects or faults."""

    file: str
    values: list[Value]
    positions: Sequence[int]
    """Line of each in the part of the file that is read, from 1; its row where no lines are."""
    before: Callable[[], int]
    """Lines or rows of the file ahead of that part. Asked only for a fault: it may take a read."""
    numbers: range | None = None
    """Number of each record in a document, from 1, where several may stand in one line."""
    has_lines: bool = True
    """Whether places are lines, in which people find a record."""

    def line(self, index: int) -> int:
        """Where people find record number `index` of this run in the file, from 1."""
        return self.before() + self.positions[index]

    def record(self, index: int) -> int | None:
        """Which record of the file number `index` of this run is, from 1; None where its line says
        that."""
        if self.numbers is not None:
            return self.numbers[index]
        return None if self.has_lines else self.line(index)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Consecutive records as they lie in the file, so that those left out are never parsed."""

    items: Any
    """A list, or a RecordBatch."""
    positions: Sequence[int]
    parse: Callable[[Any], list[Value]]
    """Items to values."""

    def __len__(self) -> int:
        return len(self.positions)

    def part(self, start: int, stop: int | None = None, step: int = 1) -> "Chunk":
        """Every `step`th record from `start` on, `stop` excluded."""
        at = slice(start, stop, step)
        if isinstance(self.items, pa.RecordBatch):
            rows = pa.array(range(self.items.num_rows)[at], pa.int64())
            items = self.items.slice(start, len(rows)) if step == 1 else self.items.take(rows)
        else:
            items = self.items[at]
        return Chunk(items, self.positions[at], self.parse)

    def values(self) -> list[Value]:
        """The records, parsed."""
        return self.parse(self.items)


def as_object(value: Any) -> Value:
    """A JSON value as a record, which must be an object."""
    if isinstance(value, dict):
        return value
    return BadRecord(
        "wrong_type", f"the record is {json_type_name(value)} where an object is meant"
    )
