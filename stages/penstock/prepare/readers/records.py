"""Batches of records between readers and the encoder: unparsed (`Chunk`) and parsed (`Batch`).

A record that cannot be parsed is represented by a BadRecord, so that it can be counted.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.media.reference import Folder
from penstock.prepare.bad_records import BadRecord, wrong_type
from penstock.rows.arrow import to_arrow

BATCH = 1000
"""Maximum records per batch."""

# Size at which a batch is closed, which bounds memory for long records.
BATCH_BYTES = 1 << 20

Value = dict[str, Any] | BadRecord
"""A record, or the reason why it cannot be read."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Consecutive records of one file (or hub data set), as JSON objects or faults."""

    file: str
    values: list[Value]
    positions: Sequence[int]
    """Line (or row, in files without lines) of each record within the piece, from 1."""
    before: Callable[[], int]
    """Returns the number of lines or rows before the piece. Called only for errors: it may read the
    file."""
    numbers: range | None = None
    """Number of each record in a document, from 1, if several may be in one line."""
    has_lines: bool = True
    """Whether `positions` are line numbers."""
    folder: Folder | None = None
    """The folder to which paths of images are relative."""

    def line(self, index: int) -> int:
        """Line (or row) in the file of record `index` of this batch, from 1."""
        return self.before() + self.positions[index]

    def record(self, index: int) -> int | None:
        """Number in the file of record `index` of this batch, from 1; None if its line identifies
        it."""
        if self.numbers is not None:
            return self.numbers[index]
        return None if self.has_lines else self.line(index)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Consecutive unparsed records, so that unused records are never parsed."""

    items: Any
    """A list, or a RecordBatch."""
    positions: Sequence[int]
    parse: Callable[[Any], list[Value]]
    """Items to values."""

    def __len__(self) -> int:
        return len(self.positions)

    def part(self, start: int, stop: int | None = None, step: int = 1) -> "Chunk":
        """Every `step`th record from `start` on, `stop` excluded."""
        selection = slice(start, stop, step)
        if isinstance(self.items, pa.RecordBatch):
            rows = to_arrow(np.arange(self.items.num_rows)[selection])
            # A slice in Arrow is contiguous; `take` copies, and only the rows that are used.
            items = self.items.slice(start, len(rows)) if step == 1 else self.items.take(rows)
        else:
            items = self.items[selection]
        return Chunk(items, self.positions[selection], self.parse)

    def values(self) -> list[Value]:
        """The records, parsed."""
        return self.parse(self.items)


def chunk_records(records: Iterable[dict[str, Any]]) -> Iterator[Chunk]:
    """Chunks of records that are parsed already; positions count from 1."""
    rest, first = iter(records), 1
    while batch := list(islice(rest, BATCH)):
        yield Chunk(batch, range(first, first + len(batch)), list)
        first += len(batch)


class DuplicateKeyError(ValueError):
    """A JSON object has a key twice: of its values one would be read and the other not."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, for `object_pairs_hook`. Raises DuplicateKeyError."""
    # json keeps the last of equal keys without a word.
    members = dict(pairs)
    if len(members) != len(pairs):
        names = Counter(name for name, _ in pairs)
        twice = next(name for name in members if names[name] > 1)
        raise DuplicateKeyError(f"key {twice!r} is there {names[twice]} times; write it once")
    return members


JSON = json.JSONDecoder(object_pairs_hook=unique_keys)
"""Decodes JSON whose objects have each key once."""


def as_object(value: Any) -> Value:
    """Return a JSON object, a list of messages as an object with that column, or a BadRecord for
    another value."""
    if isinstance(value, dict):
        return value
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, dict) and ("role" in first or "from" in first):
        return {"messages" if "role" in first else "conversations": value}
    return wrong_type("the record", value, "an object")
