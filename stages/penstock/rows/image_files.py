"""Processed images, audio and videos on disk: memory-mapped Arrow files of tensors, by digest.

A row is an image, audio or a video, as the schema's metadata says. For each output of its processor
there is a column with its bytes and one, `<name>.shape`, with its shape; the column's metadata has
the data type, whether the model takes it, and the table of pixels (`rows.pixel_table`) if they are
stored as such. `width` and `height` are those of the image itself. An image that cannot be used has
an `error` instead.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path
from struct import unpack_from
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.cache.manifest import listed_files
from penstock.core.errors import ArtifactError
from penstock.rows.arrow import (
    binary_array,
    list_array,
    map_batches,
    string_array,
    to_arrow,
)
from penstock.rows.pixel_table import PixelTable, StoredTensor
from penstock.rows.schema import IMAGE_DIGEST_BYTES

MEDIA = "media"
"""Folder of these files in an artifact and in the slice cache."""

BATCH_BYTES = 4 << 20
"""Size at which a record batch is written."""

# Record batches whose buffers are kept: finding them takes longer than reading a tensor.
OPEN_BATCHES = 4096

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
    rate; of a video, those of a frame. 0 if it cannot be used."""
    error: str | None = None
    kind: str = IMAGE


def write_images(
    part: Path,
    images: Iterator[StoredImage],
    unused: frozenset[str] = frozenset(),
    kind: str = IMAGE,
) -> int:
    """Write images in order; returns their number. Outputs in `unused` are not read for models."""
    # The schema needs the first usable image, since an unusable one has no tensors.
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
            size += sum(tensor.content.nbytes for tensor in image.tensors.values())
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
        self._forms: list[_Form] = []
        self._files: set[Path] = set()
        self._index: _Index | None = None
        # Of the instance: on the method, the cache would hold all instances and their maps.
        self._open = lru_cache(OPEN_BATCHES)(self._open_batch)
        self.add(files)

    @classmethod
    def in_folder(cls, folder: Path) -> "ImageFiles":
        """All files of a folder, which may be missing."""
        return cls(listed_files(folder, "*.arrow"))

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

    def kinds(self) -> set[str]:
        """The kinds of media in them."""
        return {form.kind for form in self._forms}

    def get(self, digest: bytes) -> StoredImage | None:
        """An image, whose tensors are read-only views of its file; None if no file has it."""
        index = self._find([digest])[0]
        return None if index is None else self._read(digest, *index)

    def inputs(self, digests: Sequence[bytes]) -> list[dict[str, StoredTensor]]:
        """The tensors of images that the model takes. Raises ArtifactError if one has none."""
        inputs: list[dict[str, StoredTensor]] = []
        for digest, index in zip(digests, self._find(digests), strict=True):
            opened = None if index is None else self._open(index[0])
            if index is None or opened is None or opened.errors[index[1]].is_valid:
                raise ArtifactError(
                    f"the tensors of image {digest.hex()[:16]} are missing.\n"
                    "  Build the data again with --force prepare."
                )
            inputs.append({column.form.name: column.read(index[1]) for column in opened.inputs})
        return inputs

    def _read(self, digest: bytes, number: int, row: int) -> StoredImage:
        batch, opened, kind = self._batches[number], self._open(number), self._forms[number].kind
        error = opened.errors[row].as_py()
        if error is not None:
            return StoredImage(digest, {}, error=error, kind=kind)
        size = batch.column("width")[row].as_py(), batch.column("height")[row].as_py()
        tensors = {column.form.name: column.read(row) for column in opened.columns}
        return StoredImage(digest, tensors, size, kind=kind)

    def _open_batch(self, number: int) -> "_Batch":
        return _Batch.of(self._batches[number], self._forms[number])

    def _find(self, digests: Sequence[bytes]) -> list[tuple[int, int] | None]:
        if self._index is None:
            self._index = _Index.of(self._batches)
        return self._index.find(digests)

    def _add(self, path: Path) -> None:
        batches = map_batches(path, "Build it again with --force prepare.")
        self._batches += batches
        # One for all, so that equal pixel tables are the same object.
        self._forms += [_Form.of(batch.schema) for batch in batches[:1]] * len(batches)


@dataclass(frozen=True)
class _Index:
    """Places of images, sorted by the first bytes of their digests: 12 bytes for each."""

    digests: list[np.ndarray]
    """The digests of each record batch, uint8 [images, 32], as views of the files."""
    starts: list[int]
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
        starts = [0, *accumulate(map(len, digests))]
        return cls(digests, starts, keys[order], order)

    def find(self, digests: Sequence[bytes]) -> list[tuple[int, int] | None]:
        keys = np.frombuffer(b"".join(digests), np.uint64)[:: IMAGE_DIGEST_BYTES // 8]
        sides = (self.keys.searchsorted(keys, bound).tolist() for bound in ("left", "right"))
        return [self._find(*bounds) for bounds in zip(digests, *sides, strict=True)]

    def _find(self, digest: bytes, start: int, end: int) -> tuple[int, int] | None:
        for index in self.order[start:end].tolist():
            number = bisect_right(self.starts, index) - 1
            row = index - self.starts[number]
            if self.digests[number][row].tobytes() == digest:
                return number, row
        return None


def _digests(column: Any) -> np.ndarray:
    start, count = column.offset * IMAGE_DIGEST_BYTES, len(column) * IMAGE_DIGEST_BYTES
    flat = np.frombuffer(column.buffers()[1], np.uint8, count, start)
    return flat.reshape(-1, IMAGE_DIGEST_BYTES)


@dataclass(frozen=True)
class _Column:
    name: str
    index: int
    """Of the column; that of its shapes is the next one."""
    dtype: np.dtype[Any]
    is_input: bool
    """Whether the model takes them."""
    table: PixelTable | None

    def tensor_of(self, image: StoredImage) -> StoredTensor:
        """The tensor of an image that is written to this column. Raises ValueError for another
        dtype."""
        if image.error is not None:
            return StoredTensor((0,), np.empty(0, self.dtype))
        tensor = image.tensors[self.name]
        if tensor.dtype != self.dtype:
            raise ValueError(f"{self.name} is {tensor.dtype} where other images have {self.dtype}")
        return tensor


@dataclass(frozen=True)
class _Form:
    kind: str
    columns: tuple[_Column, ...]

    @classmethod
    def of(cls, schema: pa.Schema) -> "_Form":
        kind = (schema.metadata or {}).get(KIND, IMAGE.encode()).decode()
        return cls(kind, tuple(_columns(schema)))


@dataclass(frozen=True)
class _Tensors:
    """The buffers of a column of tensors in a record batch."""

    form: _Column
    first: int
    """Number of the batch's first row in the buffers."""
    offsets: pa.Buffer
    """Where each tensor begins in `values`, int64."""
    values: pa.Buffer
    first_shape: int
    shape_offsets: pa.Buffer
    """Where each shape begins in `shapes`, int32."""
    shapes: pa.Buffer
    """int32."""

    @classmethod
    def of(cls, form: _Column, batch: pa.RecordBatch) -> "_Tensors":
        column, shape = batch.column(form.index), batch.column(form.index + 1)
        _, offsets, values = column.buffers()
        _, shape_offsets, _, shapes = shape.buffers()
        return cls(form, column.offset, offsets, values, shape.offset, shape_offsets, shapes)

    def read(self, row: int) -> StoredTensor:
        """The tensor in a row, as a view of the file."""
        form = self.form
        # From the buffers, as pyarrow makes an object for every scalar.
        begin, end = unpack_from("<ii", self.shape_offsets, 4 * (self.first_shape + row))
        shape = unpack_from(f"<{end - begin}i", self.shapes, 4 * begin)
        start, end = unpack_from("<qq", self.offsets, 8 * (self.first + row))
        if start == end:
            return StoredTensor(shape, np.empty(shape, form.dtype))
        content = np.frombuffer(self.values, np.uint8, end - start, offset=start)
        if form.table is None or content.nbytes == math.prod(shape) * form.dtype.itemsize:
            return StoredTensor(shape, content.view(form.dtype).reshape(shape))
        pixels = content.reshape(shape[0], len(form.table.values), -1)
        return StoredTensor(shape, pixels, form.table)


@dataclass(frozen=True)
class _Batch:
    errors: pa.Array
    columns: tuple[_Tensors, ...]
    inputs: tuple[_Tensors, ...]
    """Those that the model takes."""

    @classmethod
    def of(cls, batch: pa.RecordBatch, form: _Form) -> "_Batch":
        columns = tuple(_Tensors.of(column, batch) for column in form.columns)
        inputs = tuple(column for column in columns if column.form.is_input)
        return cls(batch.column("error"), columns, inputs)


def _columns(schema: pa.Schema) -> Iterator[_Column]:
    for index, field in enumerate(schema):
        about: Mapping[bytes, bytes] = field.metadata or {}
        if DTYPE not in about:
            continue
        table = None
        if TABLE in about:
            values = np.frombuffer(bytes.fromhex(about[TABLE].decode()), np.float32)
            table = PixelTable(values.reshape(-1, 256), int(about[REPEATS]))
        dtype = np.dtype(about[DTYPE].decode())
        yield _Column(field.name, index, dtype, about[IS_INPUT] == b"yes", table)


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
        # With 64-bit offsets: `binary` holds at most 2 GiB in a batch, which one video may exceed.
        fields.append(pa.field(name, pa.large_binary(), nullable=False, metadata=about))
        fields.append(pa.field(f"{name}{SHAPE}", pa.list_(pa.int32()), nullable=False))
    return pa.schema(fields)


def _to_batch(
    images: Sequence[StoredImage], schema: pa.Schema, buffers: dict[str, np.ndarray]
) -> pa.RecordBatch:
    """A batch whose tensors are in `buffers`, until the next one is built."""
    # In the order of the schema's fields.
    columns: list[pa.Array] = [
        binary_array([image.digest for image in images], IMAGE_DIGEST_BYTES),
        *map(to_arrow, np.array([image.size for image in images], np.int32).T),
        string_array([image.error for image in images]),
    ]
    for column in _columns(schema):
        tensors = [column.tensor_of(image) for image in images]
        raw = [
            np.ascontiguousarray(tensor.content).reshape(-1).view(np.uint8) for tensor in tensors
        ]
        ends = np.cumsum([0, *map(len, raw)], dtype=np.int64)
        used = int(ends[-1])
        if column.name not in buffers or len(buffers[column.name]) < used:
            buffers[column.name] = np.empty(max(used, 2 * BATCH_BYTES), np.uint8)
        content = np.concatenate(raw, out=buffers[column.name][:used])
        parts = [None, pa.py_buffer(ends), pa.py_buffer(content)]
        columns.append(pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(raw), parts))
        shapes = np.array([*chain.from_iterable(t.shape for t in tensors)], np.int32)
        bounds = np.cumsum([0, *(len(tensor.shape) for tensor in tensors)])
        columns.append(list_array(bounds, to_arrow(shapes)))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
