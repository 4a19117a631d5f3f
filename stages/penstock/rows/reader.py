"""Packed rows on disk: memory-mapped Arrow shards, any row at once, nothing copied."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.core.errors import ArtifactError

Tokens = npt.NDArray[np.int32]

SHARDS = "rows-*.arrow"


@dataclass(frozen=True)
class Row:
    """One packed row: T tokens in len(lengths) documents. Views of the file; do not write."""

    input_ids: Tokens
    labels: Tokens
    lengths: Tokens


class PackedRows:
    """The packed rows in a folder (`data/<split>` of a packed artifact), in stored order."""

    def __init__(self, folder: Path) -> None:
        """Map the shards. Raises ArtifactError when there is none or one cannot be read."""
        shards = sorted(folder.glob(SHARDS))
        if not shards:
            raise ArtifactError(f"{folder} holds no packed rows.\n  Run the pack stage first.")
        self._columns: list[tuple[_Lists, _Lists, _Lists]] = []
        starts = [0]
        for shard in shards:
            for batch in map_batches(shard):
                names = ("input_ids", "labels", "lengths")
                ids, labels, lengths = (_Lists.of(batch.column(name)) for name in names)
                self._columns.append((ids, labels, lengths))
                starts.append(starts[-1] + batch.num_rows)
        self._starts = np.array(starts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, index: int) -> Row:
        """The row at `index`, from 0. Raises IndexError outside of the folder's rows."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        batch = int(np.searchsorted(self._starts, index, side="right")) - 1
        at = index - int(self._starts[batch])
        ids, labels, lengths = self._columns[batch]
        return Row(ids.at(at), labels.at(at), lengths.at(at))

    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of tokens of every row."""
        parts = [np.diff(ids.offsets) for ids, _, _ in self._columns]
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


@dataclass(frozen=True)
class _Lists:
    """A list<int32> column as flat values and offsets into them."""

    values: Tokens
    offsets: Tokens

    @classmethod
    def of(cls, column: pa.Array) -> "_Lists":
        lists = column.cast(pa.list_(pa.int32()), safe=True)
        assert isinstance(lists, pa.ListArray)
        values, offsets = flat(lists)
        return cls(values, offsets)

    def at(self, index: int) -> Tokens:
        return self.values[self.offsets[index] : self.offsets[index + 1]]


def flat(lists: pa.ListArray) -> tuple[Tokens, Tokens]:
    """A list column as (values, offsets into them), both views of Arrow's memory."""
    return (
        lists.values.to_numpy(zero_copy_only=True),
        lists.offsets.to_numpy(zero_copy_only=True),
    )


def map_batches(path: Path) -> list[pa.RecordBatch]:
    """The record batches of an Arrow IPC file, mapped into memory.

    Raises ArtifactError when the file is cut short or is not one.
    """
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        return [reader.get_batch(index) for index in range(reader.num_record_batches)]
    except (pa.ArrowInvalid, OSError) as error:
        raise ArtifactError(
            f"{path} cannot be read as Arrow: {error}\n  Build it again with --force."
        ) from error
