"""Read Megatron-LM indexed datasets: token ids in `<prefix>.bin`, index in `<prefix>.idx`.

Index of `MMIDIDX` files (the current format of Megatron-LM), little-endian:

    9 bytes  magic, MMIDIDX and two zeros    uint64  version, 1      uint8  code of the token type
    uint64   sequences S                     uint64  entries D of the document index
    int32[S] tokens of each sequence         int64[S] its first byte in the .bin
    int64[D] the first sequence of each document, and at the end S
    int8[S]  modes, in multimodal data alone

Index of the older `TNTIDX` files (implementations `lazy` and `cached`):

    8 bytes  magic, TNTIDX and two zeros     uint64  version, 1      uint64 code of the token type
    uint64   its bytes                       uint64  sequences S     uint64 sizes N
    uint64   entries D of the document index
    int64[S+1] the first size of each sequence    int64[S+1] its first token in the .bin
    int64[N] sizes                                int64[D] as above
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.core.errors import StageError
from penstock.prepare.readers.decompress import SourceFile
from penstock.prepare.readers.records import BATCH, BATCH_BYTES, Chunk, Value

MMIDIDX, TNTIDX = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00"
VERSION = 1

DTYPES: Mapping[int, str] = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Token dtypes by code."""

FLOAT_CODES = (6, 7)
"""Codes of floating-point dtypes, which are not token ids."""

# Upper bound on token offsets: beyond any file, but its byte offset fits in 64 bits.
MAX_TOKENS = 1 << 56

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class MegatronIndex:
    """A parsed index. Document d consists of sequences `starts[d]` to `starts[d + 1]`."""

    dtype: np.dtype[np.integer]
    lengths: Numbers
    """Tokens of each sequence."""
    pointers: Numbers
    """First byte of each sequence in the .bin."""
    starts: Numbers

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    def document_bytes(self) -> Numbers:
        """Size of every document in bytes."""
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        return np.diff(ends[self.starts]) * self.dtype.itemsize

    def out_of_range_end(self, available: int) -> int | None:
        """The largest end, in bytes, of the sequences that exceed `available` bytes; None if all
        fit. Computed without sums that would overflow for a damaged index."""
        size = self.dtype.itemsize
        is_placed = (self.pointers >= 0) & (self.pointers <= available)
        room = (available - np.where(is_placed, self.pointers, available)) // size
        outside = np.flatnonzero(~is_placed | (self.lengths > room))
        ends = (
            int(self.pointers[index]) + int(self.lengths[index]) * size
            for index in outside.tolist()
        )
        return max(ends, default=None)


def read_documents(file: SourceFile, span: tuple[int, int] | None) -> Iterator[Chunk]:
    """Read the documents `span` (all: None) as records with equal `input_ids` and `labels`.

    Raises StageError if the two files do not belong together or one is truncated.
    """
    index = read_index(file)
    first, last = span or (0, index.num_documents)
    assert file.data_file
    assert isinstance(file.data_file.location, Path)
    data = _map_file(file.data_file.location)
    sizes = index.document_bytes()[first:last]
    batches = np.cumsum(sizes) // BATCH_BYTES + np.arange(len(sizes)) // BATCH

    def parse(numbers: list[int]) -> list[Value]:
        return [_read_document(index, data, number) for number in numbers]

    row = 1
    for batch in np.split(np.arange(first, last), np.flatnonzero(np.diff(batches)) + 1):
        if len(batch):
            yield Chunk(batch.tolist(), range(row, row + len(batch)), parse)
            row += len(batch)


def read_index(file: SourceFile) -> MegatronIndex:
    """Read an index; validates it and compares it with the size of the data file.

    Raises StageError if it is invalid or truncated, or refers to data beyond the file's end.
    """
    assert file.data_file
    assert isinstance(file.location, Path)
    assert isinstance(file.data_file.location, Path)
    status = file.location.stat()
    try:
        index = _read_index_file(file.location, (status.st_mtime_ns, status.st_size))
    except ValueError as error:
        raise StageError(
            f"{file.name} is not a Megatron index: {error}.\n"
            "  Write both files again, or use another prefix."
        ) from None
    # Not in the cached function: its key does not change with the data file.
    available = file.data_file.location.stat().st_size
    if (end := index.out_of_range_end(available)) is not None:
        raise StageError(
            f"{file.data_file.name} has {available} bytes, but {file.name} refers to"
            f" {end}: it is truncated, or belongs to another index.\n"
            "  Write both files again."
        )
    return index


@lru_cache(maxsize=2)
def _read_index_file(path: Path, stamp: tuple[int, int]) -> MegatronIndex:
    del stamp  # of the key of the cache: it changes when the file is written again
    return _parse_index(_map_file(path))


def _map_file(path: Path) -> Bytes:
    # np.memmap refuses an empty file.
    empty = not path.stat().st_size
    return np.empty(0, np.uint8) if empty else np.memmap(path, dtype=np.uint8, mode="r")


def _read_document(index: MegatronIndex, data: Bytes, number: int) -> Value:
    first, last = int(index.starts[number]), int(index.starts[number + 1])
    parts = [
        np.frombuffer(data, index.dtype, int(length), int(pointer))
        for pointer, length in zip(
            index.pointers[first:last], index.lengths[first:last], strict=True
        )
        if length
    ]
    tokens = np.concatenate(parts) if parts else np.empty(0, index.dtype)
    return {"input_ids": tokens, "labels": tokens}


def _parse_index(raw: Bytes) -> MegatronIndex:
    magic = raw[: len(MMIDIDX)].tobytes()
    if magic == MMIDIDX:
        index, modes = _parse_mmidx(raw)
    elif magic.startswith(TNTIDX):
        index, modes = _parse_tntidx(raw)
    else:
        raise ValueError(f"it starts with {magic!r}, not with {MMIDIDX!r} or {TNTIDX!r}")
    if np.any(modes):
        raise ValueError("its sequences have modes (multimodal data); only text is supported")
    # np.frombuffer takes a count of -1 for all that is left of the file.
    if len(index.lengths) and index.lengths.min() < 0:
        raise ValueError("a sequence has a negative length")
    starts = index.starts
    ordered = len(starts) and starts[0] == 0 and starts[-1] == len(index.lengths)
    if not (ordered and np.all(np.diff(starts) >= 0)):
        raise ValueError("its documents do not cover its sequences in order")
    return index


def _parse_mmidx(raw: Bytes) -> tuple[MegatronIndex, npt.NDArray[np.int8]]:
    reader = _BinaryReader(raw, len(MMIDIDX))
    reader.version()
    dtype = _dtype(reader.number("B"))
    sequences, documents = reader.number("Q"), reader.number("Q")
    lengths = reader.array("<i4", sequences)
    pointers = reader.array("<i8", sequences)
    starts = reader.array("<i8", documents)
    modes = reader.array("i1", sequences) if reader.left else np.empty(0, np.int8)
    reader.end()
    return MegatronIndex(dtype, lengths, pointers, starts), modes.astype(np.int8)


def _parse_tntidx(raw: Bytes) -> tuple[MegatronIndex, npt.NDArray[np.int8]]:
    reader = _BinaryReader(raw, len(TNTIDX))
    reader.version()
    dtype, size = _dtype(reader.number("Q")), reader.number("Q")
    if size != dtype.itemsize:
        raise ValueError(f"its tokens have {size} bytes where {dtype} has {dtype.itemsize}")
    sequences, num_sizes, documents = (reader.number("Q") for _ in range(3))
    dimensions = reader.array("<i8", sequences + 1)
    offsets = reader.array("<i8", sequences + 1)
    sizes = reader.array("<i8", num_sizes)
    starts = reader.array("<i8", documents)
    reader.end()
    if offsets.min() < 0 or offsets.max() > MAX_TOKENS:
        raise ValueError("a sequence offset is out of range")
    if num_sizes != sequences or not np.array_equal(dimensions, np.arange(sequences + 1)):
        raise ValueError("its sequences are not one-dimensional")
    return MegatronIndex(dtype, sizes, offsets[:-1] * size, starts), np.empty(0, np.int8)


def _dtype(code: int) -> np.dtype[np.integer]:
    if code in FLOAT_CODES:
        raise ValueError("it has a floating-point dtype, not token ids")
    if code not in DTYPES:
        raise ValueError(f"{code} is not the code of a token dtype")
    return np.dtype(DTYPES[code])


class _BinaryReader:
    """Reads numbers from a buffer in order. Raises ValueError beyond its end."""

    def __init__(self, raw: Bytes, offset: int) -> None:
        self._raw, self._at = raw, offset

    @property
    def left(self) -> int:
        return len(self._raw) - self._at

    def number(self, form: str) -> int:
        size = struct.calcsize(f"<{form}")
        self._require(size)
        raw = self._raw[self._at : self._at + size].tobytes()
        [value] = struct.unpack(f"<{form}", raw)
        self._at += size
        return value

    def array(self, dtype: str, count: int) -> Numbers:
        self._require(count * np.dtype(dtype).itemsize)
        array = np.frombuffer(self._raw, dtype, count, self._at)
        self._at += array.nbytes
        return array.astype(np.int64)

    def version(self) -> None:
        version = self.number("Q")
        if version != VERSION:
            raise ValueError(f"it has version {version}; only version {VERSION} is supported")

    def end(self) -> None:
        if self.left:
            raise ValueError(f"{self.left} bytes follow its last entry")

    def _require(self, size: int) -> None:
        if size > self.left:
            raise ValueError(f"it is truncated: {self.left} bytes are left, {size} expected")
