"""Packed rows on disk: memory-mapped Arrow shards with random access, without copies."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.config.schema.dataset import Kind
from penstock.core.cache.manifest import listed_files
from penstock.core.errors import ArtifactError
from penstock.rows.image_files import MEDIA, ImageFiles
from penstock.rows.pixel_table import StoredTensor
from penstock.rows.schema import IMAGE_TOKENS, IMAGES, LOSS_WEIGHTS, PACKED, PACKED_SCHEMAS
from penstock.rows.shared_prefix import PrefixSharing

Tokens = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float32]
Number = TypeVar("Number", np.int32, np.float32)

SHARDS = "rows-*.arrow"


@dataclass(frozen=True)
class RowImage:
    """One image of a packed row."""

    tensors: Mapping[str, StoredTensor]
    """Outputs of the image processor that the model takes, as views of the file."""
    num_tokens: int
    """Number of its image tokens."""
    digest: bytes | None = None
    """What identifies it; None: it is taken for no other."""


@dataclass(frozen=True)
class Row:
    """One packed row: T tokens in len(lengths) documents. Read-only views of the file."""

    input_ids: Tokens
    labels: Tokens
    lengths: Tokens
    number: int
    """Index among the packed rows, from 0."""
    branching: PrefixSharing | None = None
    """Prefix sharing of all its documents; None for SFT data."""
    images: tuple[RowImage, ...] = ()
    """The images of its documents, in the order of their tokens."""
    loss_weights: Weights | None = None
    """Loss weight of each label, above 0; 0 without a label. None: all labels weigh 1."""


class PackedRows:
    """The packed rows in a folder (`data/<split>` of a packed artifact), in stored order."""

    def __init__(self, folder: Path) -> None:
        """Memory-map the shards. Raises ArtifactError if there is none or one cannot be read."""
        shards = listed_files(folder, SHARDS)
        if not shards:
            raise ArtifactError(f"{folder} has no packed rows.\n  Run the pack stage first.")
        self.folder = folder
        self._columns: list[tuple[_ListColumn, _ListColumn, _ListColumn]] = []
        self._batches: list[pa.RecordBatch] = []
        starts = [0]
        for shard in shards:
            for batch in map_batches(shard):
                names = ("input_ids", "labels", "lengths")
                ids, labels, lengths = (_ListColumn.of(batch.column(name)) for name in names)
                self._columns.append((ids, labels, lengths))
                self._batches.append(batch)
                starts.append(starts[-1] + batch.num_rows)
        self._starts = starts
        self.kind: Kind = _detect_kind(self._batches[0].schema if self._batches else PACKED)
        """Kind of data: SFT, preference or KTO."""

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> Row:
        """The row at `index`, from 0. Raises IndexError outside of the folder's rows."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        batch = bisect_right(self._starts, index) - 1
        row = index - self._starts[batch]
        ids, labels, lengths = self._columns[batch]
        branching = None if self.kind == "sft" else _branching(self._batches[batch], row)
        images = self._images(self._batches[batch], row)
        weights = loss_weights(self._batches[batch])
        own = None
        if weights is not None:
            values, offsets = weights
            own = values[offsets[row] : offsets[row + 1]]
        return Row(ids.at(row), labels.at(row), lengths.at(row), index, branching, images, own)

    def _images(self, batch: pa.RecordBatch, row: int) -> tuple[RowImage, ...]:
        if IMAGES not in batch.schema.names:
            return ()
        digests, counts = (batch.column(name)[row].as_py() for name in (IMAGES, IMAGE_TOKENS))
        return tuple(
            RowImage(tensors, count, digest)
            for tensors, count, digest in zip(
                self._media.inputs(digests), counts, digests, strict=True
            )
        )

    @cached_property
    def _media(self) -> ImageFiles:
        return ImageFiles.in_folder(self.folder.parent.parent / MEDIA)

    def table(self) -> pa.Table:
        """All columns of all rows, memory-mapped (`rows.schema.PACKED_SCHEMAS` lists them)."""
        schema = self._batches[0].schema if self._batches else PACKED_SCHEMAS[self.kind]
        return pa.Table.from_batches(self._batches, schema)

    def samples(self) -> list[bytes]:
        """Digests of all samples, row by row; empty for SFT data."""
        if self.kind == "sft":
            return []
        parts = (batch.column("samples").flatten().to_pylist() for batch in self._batches)
        return [sample for part in parts for sample in part]

    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of every row."""
        parts = [np.diff(ids.offsets).astype(np.int64) for ids, _, _ in self._columns]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def documents(self) -> npt.NDArray[np.int64]:
        """Number of documents of every row."""
        parts = [np.diff(lengths.offsets).astype(np.int64) for _, _, lengths in self._columns]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of every document, row by row."""
        parts = [lengths.used().astype(np.int64) for _, _, lengths in self._columns]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def image_tokens(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(sum of the numbers of tokens of every row's images, sum of their squares)."""
        if not self._batches or IMAGE_TOKENS not in self._batches[0].schema.names:
            return np.zeros(len(self), np.int64), np.zeros(len(self), np.int64)
        columns = [_ListColumn.of(batch.column(IMAGE_TOKENS)) for batch in self._batches]
        sums = np.concatenate([column.sums() for column in columns])
        return sums, np.concatenate([column.sums_of_squares() for column in columns])

    def squares(self) -> npt.NDArray[np.int64]:
        """Sum of squared document lengths of every row."""
        parts = [lengths.sums_of_squares() for _, _, lengths in self._columns]
        return np.concatenate([np.empty(0, np.int64), *parts])


class UnmaskedRows(PackedRows):
    """The same rows, each as a single document: attention is not masked between its samples."""

    def row(self, index: int) -> Row:
        """The row at `index`, from 0. Raises IndexError outside of the folder's rows."""
        row = super().row(index)
        return replace(row, lengths=row.lengths.sum(keepdims=True, dtype=np.int32))

    def documents(self) -> npt.NDArray[np.int64]:
        """1 for every row."""
        return np.ones(len(self), np.int64)

    def squares(self) -> npt.NDArray[np.int64]:
        """Squared length of every row."""
        return self.lengths() ** 2


@dataclass(frozen=True)
class _ListColumn:
    """A list<int32> column as flat values and offsets into them."""

    values: Tokens
    offsets: Tokens

    @classmethod
    def of(cls, column: pa.Array) -> "_ListColumn":
        lists = column.cast(pa.list_(pa.int32()), safe=True)
        assert isinstance(lists, pa.ListArray)
        values, offsets = flat(lists)
        return cls(values, offsets)

    def at(self, index: int) -> Tokens:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def used(self) -> Tokens:
        return self.values[self.offsets[0] : self.offsets[-1]]

    def sums(self) -> npt.NDArray[np.int64]:
        return self._sums(self.used().astype(np.int64))

    def sums_of_squares(self) -> npt.NDArray[np.int64]:
        used = self.used().astype(np.int64)
        return self._sums(used * used)

    def _sums(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        # Not np.add.reduceat, which gives an element instead of 0 for an empty list.
        totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
        return np.diff(totals[self.offsets - self.offsets[0]])


def _detect_kind(schema: pa.Schema) -> Kind:
    # Each kind has the columns of the previous one and more, so the last match is the kind.
    held = {*schema.names}
    kinds: list[Kind] = [
        kind for kind, schema in PACKED_SCHEMAS.items() if held.issuperset(schema.names)
    ]
    return kinds[-1]


def _branching(batch: pa.RecordBatch, index: int) -> PrefixSharing:
    columns = (field.name for field in fields(PrefixSharing) if field.name in batch.schema.names)
    return PrefixSharing(**{name: tuple(batch.column(name)[index].as_py()) for name in columns})


def flat(lists: pa.ListArray) -> tuple[Tokens, Tokens]:
    """A list column as (values, offsets into them), both views of Arrow's memory."""
    return _view(lists.values, np.int32), _view(lists.offsets, np.int32)


def loss_weights(batch: pa.RecordBatch) -> tuple[Weights, Tokens] | None:
    """The loss weights as (values, offsets into them), as views; None if all labels weigh 1."""
    if LOSS_WEIGHTS.name not in batch.schema.names:
        return None
    lists = batch.column(LOSS_WEIGHTS.name)
    return _view(lists.values, np.float32), _view(lists.offsets, np.int32)


def _view(numbers: pa.Array, dtype: type[Number]) -> npt.NDArray[Number]:
    """View an array without nulls. Arrow's own `to_numpy` imports pandas, which would cost every
    rank and every data loader process a second."""
    assert numbers.type == pa.from_numpy_dtype(dtype)
    assert not numbers.null_count
    _, buffer = numbers.buffers()
    if buffer is None:
        return np.empty(0, dtype)
    offset = numbers.offset * np.dtype(dtype).itemsize
    return np.frombuffer(buffer, dtype, count=len(numbers), offset=offset)


def map_batches(path: Path) -> list[pa.RecordBatch]:
    """The record batches of an Arrow IPC file, memory-mapped.

    Raises ArtifactError if the file is truncated or is not an Arrow IPC file.
    """
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        return [reader.get_batch(index) for index in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError) as error:
        raise ArtifactError(
            f"{path} cannot be read as Arrow: {error}\n  Build it again with --force."
        ) from error
