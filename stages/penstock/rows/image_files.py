"""Processed images and audio on disk: memory-mapped Arrow files of tensors, by the digest of each.

A row is an image, or audio, as the schema's metadata says. For each output of its processor there
is a column with its bytes and one, `<name>.shape`, with its shape; the column's metadata has the
data type, whether the model takes it, and the table of pixels (`rows.pixel_table`) if they are
stored as such. `width` and `height` are those of the image itself. An image that cannot be used has
an `error` instead.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.errors import ArtifactError
from penstock.rows.pixel_table import PixelTable, StoredTensor
from penstock.rows.schema import IMAGE_DIGEST_BYTES

MEDIA = "media"
"""Folder of these files in an artifact and in the slice cache."""

BATCH_BYTES = 4 << 20
"""Size at which a record batch is written."""

SHAPE = ".shape"
IMAGE = "image"
KIND = b"kind"
DTYPE, IS_INPUT, TABLE, REPEATS = b"dtype", b"input", b"table", b"repeats"


@dataclass(frozen=True)
class StoredImage:
    """An image with its tensors, or the reason why it has none."""

    digest: bytes
    tensors: Mapping[str, StoredTensor]
    size: tuple[int, int] = (0, 0)
    """Width and height in pixels, before processing; of audio, the number of samples and their
    rate. 0 if it cannot be used."""
    error: str | None = None
    kind: str = IMAGE


def write_images(
    part: Path,
    images: Iterator[StoredImage],
    unused: frozenset[str] = frozenset(),
    kind: str = IMAGE,
) -> int:
    """Write images in order; returns their number. Outputs in `unused` are not read for models."""
    ahead: list[StoredImage] = []
    for image in images:
        ahead.append(image)
        if image.error is None:
            break
    schema = _schema(ahead[-1].tensors if ahead else {}, unused)
    if kind != IMAGE:
        schema = schema.with_metadata({KIND: kind.encode()})
    held: list[StoredImage] = []
    # Reused for every batch: page faults of new memory cost more than the copies.
    buffers: dict[str, np.ndarray] = {}
    count = size = 0
    with pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for image in chain(ahead, images):
            held.append(image)
            count += 1
            size += sum(each.content.nbytes for each in image.tensors.values())
            if size >= BATCH_BYTES:
                writer.write_batch(_to_batch(held, schema, buffers))
                held, size = [], 0
        if held:
            writer.write_batch(_to_batch(held, schema, buffers))
    return count


class ImageFiles:
    """The images of several files."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Memory-map the files. Raises ArtifactError for one that cannot be read."""
        self._batches: list[pa.RecordBatch] = []
        self._columns: list[Sequence[_Column]] = []
        self._files: set[Path] = set()
        self._index: _Index | None = None
        self.add(files)

    @classmethod
    def in_folder(cls, folder: Path) -> "ImageFiles":
        """All files of a folder, which may be missing."""
        return cls(sorted(folder.glob("*.arrow")))

    def add(self, files: Sequence[Path]) -> None:
        """Memory-map further files."""
        for path in files:
            if path not in self._files:
                self._files.add(path)
                self._add(path)
                self._index = None

    def digests(self) -> list[bytes]:
        """The images, file after file, each once."""
        columns = (batch.column("digest").to_pylist() for batch in self._batches)
        return [*dict.fromkeys(chain.from_iterable(columns))]

    def get(self, digest: bytes) -> StoredImage | None:
        """An image, whose tensors are read-only views of its file; None if no file has it."""
        place = self._find(digest)
        return None if place is None else self._read(digest, *place)

    def inputs(self, digest: bytes) -> dict[str, StoredTensor]:
        """The tensors of an image that the model takes. Raises ArtifactError if there are none."""
        place = self._find(digest)
        found = None if place is None else self._read(digest, *place)
        if place is None or found is None or found.error is not None:
            raise ArtifactError(
                f"the tensors of image {digest.hex()[:16]} are missing.\n"
                "  Build the data again with --force prepare."
            )
        names = (each.name for each in self._columns[place[0]] if each.is_input)
        return {name: found.tensors[name] for name in names}

    def _read(self, digest: bytes, number: int, row: int) -> StoredImage:
        batch = self._batches[number]
        error = batch.column("error")[row].as_py()
        kind = (batch.schema.metadata or {}).get(KIND, IMAGE.encode()).decode()
        if error is not None:
            return StoredImage(digest, {}, error=error, kind=kind)
        size = batch.column("width")[row].as_py(), batch.column("height")[row].as_py()
        columns = self._columns[number]
        tensors = {each.name: each.read(batch, row) for each in columns}
        return StoredImage(digest, tensors, size, kind=kind)

    def _find(self, digest: bytes) -> tuple[int, int] | None:
        """Index of the record batch of an image, and its row in it."""
        if self._index is None:
            self._index = _Index.of(self._batches)
        return next(self._index.find(digest), None)

    def _add(self, path: Path) -> None:
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            batches = [reader.get_batch(at) for at in range(reader.num_record_batches)]
        except (pa.ArrowException, OSError) as error:
            raise ArtifactError(
                f"{path} cannot be read as Arrow: {error}\n  Build it again with --force prepare."
            ) from error
        columns = list(_columns(reader.schema))
        self._batches += batches
        self._columns += [columns] * len(batches)


@dataclass(frozen=True)
class _Index:
    """Places of images, sorted by the first bytes of their digests: 12 bytes for each."""

    digests: list[np.ndarray]
    """The digests of each record batch, uint8 [images, 32], as views of the files."""
    starts: np.ndarray
    """Number of the first image of each record batch, then the number of images."""
    keys: np.ndarray
    order: np.ndarray

    @classmethod
    def of(cls, batches: Sequence[pa.RecordBatch]) -> "_Index":
        digests = [_digests(batch.column("digest")) for batch in batches]
        nothing = np.empty(0, np.uint64)
        keys = np.concatenate(
            [nothing, *(np.ascontiguousarray(d[:, :8]).view(np.uint64)[:, 0] for d in digests)]
        )
        order = np.argsort(keys, kind="stable").astype(np.uint32)
        starts = np.cumsum([0, *map(len, digests)])
        return cls(digests, starts, keys[order], order)

    def find(self, digest: bytes) -> Iterator[tuple[int, int]]:
        """The places of an image: (index of the record batch, row)."""
        key = np.frombuffer(digest, np.uint64, 1)[0]
        at = int(np.searchsorted(self.keys, key))
        while at < len(self.keys) and self.keys[at] == key:
            number = int(np.searchsorted(self.starts, self.order[at], side="right")) - 1
            row = int(self.order[at] - self.starts[number])
            if self.digests[number][row].tobytes() == digest:
                yield number, row
            at += 1


def _digests(column: Any) -> np.ndarray:
    start, count = column.offset * IMAGE_DIGEST_BYTES, len(column) * IMAGE_DIGEST_BYTES
    flat = np.frombuffer(column.buffers()[1], np.uint8, count, start)
    return flat.reshape(-1, IMAGE_DIGEST_BYTES)


@dataclass(frozen=True)
class _Column:
    """A column of tensors."""

    name: str
    dtype: np.dtype[Any]
    is_input: bool
    """Whether the model takes them."""
    table: PixelTable | None

    def read(self, batch: pa.RecordBatch, row: int) -> StoredTensor:
        """The tensor in a row, as a view of the file."""
        column: Any = batch.column(self.name)
        _, offsets, values = column.buffers()
        start, end = np.frombuffer(offsets, np.int64, 2, offset=8 * (column.offset + row)).tolist()
        shape = tuple(batch.column(f"{self.name}{SHAPE}")[row].as_py())
        content = (
            np.frombuffer(values, np.uint8, end - start, offset=start) if end > start else None
        )
        if content is None:
            return StoredTensor(shape, np.empty(shape, self.dtype))
        if self.table is None or content.nbytes == math.prod(shape) * self.dtype.itemsize:
            return StoredTensor(shape, content.view(self.dtype).reshape(shape))
        pixels = content.reshape(shape[0], len(self.table.values), -1)
        return StoredTensor(shape, pixels, self.table)

    def check(self, image: StoredImage) -> StoredTensor:
        """The tensor of an image that is written to this column."""
        if image.error is not None:
            return StoredTensor((0,), np.empty(0, self.dtype))
        found = image.tensors[self.name]
        if found.dtype != self.dtype:
            raise ValueError(f"{self.name} is {found.dtype} where other images have {self.dtype}")
        return found


def _columns(schema: pa.Schema) -> Iterator[_Column]:
    for field in schema:
        about: Mapping[bytes, bytes] = field.metadata or {}
        if DTYPE not in about:
            continue
        table = None
        if TABLE in about:
            values = np.frombuffer(bytes.fromhex(about[TABLE].decode()), np.float32)
            table = PixelTable(values.reshape(-1, 256), int(about[REPEATS]))
        dtype = np.dtype(about[DTYPE].decode())
        yield _Column(field.name, dtype, about[IS_INPUT] == b"yes", table)


def _schema(tensors: Mapping[str, StoredTensor], unused: frozenset[str]) -> pa.Schema:
    fields = [
        pa.field("digest", pa.binary(IMAGE_DIGEST_BYTES), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("error", pa.string()),
    ]
    for name in sorted(tensors):
        tensor = tensors[name]
        about = {DTYPE: tensor.dtype.str.encode(), IS_INPUT: b"no" if name in unused else b"yes"}
        if tensor.table:
            about[TABLE] = tensor.table.values.tobytes().hex().encode()
            about[REPEATS] = str(tensor.table.repeats).encode()
        fields.append(pa.field(name, pa.large_binary(), nullable=False, metadata=about))
        fields.append(pa.field(f"{name}{SHAPE}", pa.list_(pa.int32()), nullable=False))
    return pa.schema(fields)


def _to_batch(
    images: Sequence[StoredImage], schema: pa.Schema, buffers: dict[str, np.ndarray]
) -> pa.RecordBatch:
    """A batch whose tensors are in `buffers`, until the next one is built."""
    columns: list[pa.Array] = [
        pa.array([image.digest for image in images], pa.binary(IMAGE_DIGEST_BYTES)),
        *(pa.array([image.size[side] for image in images], pa.int32()) for side in (0, 1)),
        pa.array([image.error for image in images], pa.string()),
    ]
    for column in _columns(schema):
        tensors = [column.check(image) for image in images]
        raw = [np.ascontiguousarray(each.content).reshape(-1).view(np.uint8) for each in tensors]
        ends = np.cumsum([0, *map(len, raw)], dtype=np.int64)
        used = int(ends[-1])
        if column.name not in buffers or len(buffers[column.name]) < used:
            buffers[column.name] = np.empty(max(used, 2 * BATCH_BYTES), np.uint8)
        content = np.concatenate(raw, out=buffers[column.name][:used])
        parts = [None, pa.py_buffer(ends), pa.py_buffer(content)]
        columns.append(pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(raw), parts))
        columns.append(pa.array([list(each.shape) for each in tensors], pa.list_(pa.int32())))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
