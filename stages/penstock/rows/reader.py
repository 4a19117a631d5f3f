"""Packed rows on disk: memory-mapped Arrow shards with random access, without copies."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.config.schema.dataset import Kind
from penstock.core.cache.manifest import listed_files
from penstock.core.errors import ArtifactError
from penstock.rows.arrow import Tokens, Weights, flat, loss_weights, map_batches
from penstock.rows.image_files import MEDIA, ImageFiles
from penstock.rows.pixel_table import StoredTensor
from penstock.rows.schema import IMAGE_TOKENS, IMAGES, PACKED, PACKED_SCHEMAS
from penstock.rows.shared_prefix import PrefixSharing

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
        self._batches = [batch for shard in shards for batch in map_batches(shard)]
        names = ("input_ids", "labels", "lengths")
        self._columns = [
            tuple(_ListColumn.of(batch.column(name)) for name in names) for batch in self._batches
        ]
        self._starts = [0, *accumulate(batch.num_rows for batch in self._batches)]
        columns = {*(self._batches[0].schema if self._batches else PACKED).names}
        # Each kind has the columns of the previous one and more, so the last match is the kind.
        kinds: list[Kind] = [k for k, its in PACKED_SCHEMAS.items() if columns >= {*its.names}]
        self.kind: Kind = kinds[-1]
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
        branching = None
        if self.kind != "sft":
            stored = self._batches[batch]
            columns = {f.name for f in fields(PrefixSharing)}.intersection(stored.schema.names)
            branching = PrefixSharing(**{n: tuple(stored.column(n)[row].as_py()) for n in columns})
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
