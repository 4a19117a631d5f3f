"""The tensors of a Hugging Face folder, read by the byte ranges that are wanted and no more.

Files are read, never mapped: pages of a mapped file count as this process's memory. The format is
that of the safetensors library: eight bytes with the header's length, a JSON header with the dtype,
shape and place of each tensor, then the numbers in little endian, rows one after another.
"""

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

import torch

from penstock.core.errors import CapabilityError
from penstock.models.published import MXFP4

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

MAX_HEADER = 100_000_000
"""Bytes; the library's own limit."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    """Its first byte in the file."""


class SafetensorsFolder:
    """The tensors of a folder, by name.

    Every question may raise CapabilityError, for a folder that holds none or bad ones; making one
    asks none.
    """

    def __init__(self, folder: Path, single: str = SINGLE) -> None:
        """`single` is what the file is called where there is no index of several."""
        self._folder, self._single = folder, single
        self._open: dict[Path, int] = {}
        self._headers = cache(_header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU, as it is stored."""
        shape = self.stored(name).shape
        return self.box(name, (0,) * len(shape), shape)

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._files)

    def by_file(self) -> dict[Path, list[str]]:
        """The names of the tensors in each file, in the order in which they lie there."""
        found: dict[Path, list[str]] = {}
        for name in sorted(self._files, key=self.order):
            found.setdefault(self._files[name], []).append(name)
        return found

    def require(self, names: Iterable[str]) -> None:
        """Raise CapabilityError unless every name is there."""
        missing = [name for name in names if name not in self._files]
        if missing and f"{missing[0]}_blocks" in self._files:
            raise CapabilityError(f"{missing[0]} of the checkpoint is quantised: {MXFP4}.")
        if missing:
            raise CapabilityError(
                f"the checkpoint lacks {len(missing)} tensors that its config.json implies, first "
                f"{missing[0]}.\n"
                "  Check that model.model_path and model.config_path belong together."
            )

    def stored(self, name: str) -> Stored:
        """Shape, dtype and place of a tensor; reads the header of its file alone."""
        file = self._files[name]
        header = self._headers(file)
        if name not in header:
            raise _bad(file, f"it lacks {name}, which the index places there")
        return header[name]

    def order(self, name: str) -> tuple[str, int]:
        """A key by which tensors sort as they lie in the files."""
        return self._files[name].name, self.stored(name).start

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of a tensor, on the CPU, as it is stored."""
        found = self.stored(name)
        width = found.dtype.itemsize
        raw = torch.empty(math.prod(sizes) * width, dtype=torch.uint8)
        into = raw.numpy().data
        descriptor, done = self._descriptor(self._files[name]), 0
        for first, count in _runs(found.shape, offsets, sizes):
            end = done + count * width
            self._fill(descriptor, into[done:end], found.start + first * width, name)
            done = end
        return raw.view(found.dtype).view(tuple(sizes))

    @cached_property
    def _files(self) -> dict[str, Path]:
        return _files_by_tensor(self._folder, self._single)

    def _descriptor(self, file: Path) -> int:
        if file not in self._open:
            self._open[file] = os.open(file, os.O_RDONLY)
        return self._open[file]

    def _fill(self, descriptor: int, into: memoryview, place: int, name: str) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(descriptor, [into[done:]], place + done)
            if not count:
                raise _bad(self._files[name], f"it ends within {name}")
            done += count


def _runs(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """(first number, count) of the stretches of a tensor that make a box of it, in order."""
    if not math.prod(sizes):
        return
    cut = [at for at, (size, whole) in enumerate(zip(sizes, shape, strict=True)) if size < whole]
    depth = cut[-1] if cut else 0
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    count = math.prod(sizes[depth:])
    origin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for place in itertools.product(*(range(size) for size in sizes[:depth])):
        yield origin + sum(i * stride for i, stride in zip(place, strides, strict=False)), count


def _files_by_tensor(folder: Path, name: str) -> dict[str, Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            # Only the last part of a name counts: an index must not lead out of its folder.
            return {name: folder / Path(file).name for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _bad(index, "it has no weight_map of tensors and files") from error
    single = folder / name
    if not single.is_file():
        raise CapabilityError(
            f"{folder} holds no {name} and no index of shards.\n"
            "  Weights in other formats are not read; save them as safetensors first."
        )
    return dict.fromkeys(_header(single), single)


def _header(file: Path) -> Mapping[str, Stored]:
    """What the file says it holds, and does. Raises CapabilityError where the two differ."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise _bad(file, f"its header would be {length} bytes of {size}")
            header = json.loads(stream.read(length))
    except (OSError, ValueError) as error:
        raise _bad(file, str(error)) from error
    if not isinstance(header, dict):
        raise _bad(file, "its header is not a table")
    found = ((name, entry) for name, entry in header.items() if name != "__metadata__")
    return {name: _stored(file, name, entry, 8 + length, size) for name, entry in found}


def _stored(file: Path, name: str, entry: Any, begin: int, size: int) -> Stored:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(file, f"the entry of {name} is not of the format") from error
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise _bad(file, f"the entry of {name} holds what is no count")
    if dtype not in DTYPES:
        raise CapabilityError(
            f"{name} in {file} is of dtype {dtype}, which is not read.\n"
            f"  Save the weights as one of {', '.join(DTYPES)}."
        )
    if end - start != math.prod(shape) * DTYPES[dtype].itemsize or begin + end > size:
        raise _bad(file, f"{name} would be bytes {start} to {end} of {size - begin}")
    return Stored(shape, DTYPES[dtype], begin + start)


def _bad(file: Path, reason: str) -> CapabilityError:
    return CapabilityError(
        f"{file} is not a safetensors file that can be read: {reason}.\n"
        "  Fetch it again, or name another model.model_path."
    )
