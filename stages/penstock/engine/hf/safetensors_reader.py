"""Safetensors reader: read requested byte ranges of a Hugging Face folder, without mmap.

Pages of a mapped file count as this process's memory. `penstock.core.safetensors_header` describes
the format.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Self

import torch

from penstock.core.safetensors_header import SINGLE, files_by_tensor, read_header, unreadable
from penstock.engine.hf.weight_files import require_tensors

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A box of a tensor, as a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    """Its first byte in the file."""


class SafetensorsFolder:
    """The tensors of a folder, by name. Every method may raise CapabilityError for a folder without
    safetensors or with invalid ones; the constructor reads nothing."""

    def __init__(self, folder: Path, single: str = SINGLE, *, pin_memory: bool = False) -> None:
        """`single` is the name of the file if there is no index. Boxes are read into pinned memory
        if asked, from which CUDA copies while the next ones are read."""
        self._folder, self._single, self._pin_memory = folder, single, pin_memory
        self._rename: Callable[[str], str] = str
        self._open: dict[Path, int] = {}
        self._headers = cache(read_header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def renamed(self, rename: Callable[[str], str]) -> "SafetensorsFolder":
        """The same tensors under other names, which `rename` makes of those in the files. It is
        closed with this folder.
        """
        view = SafetensorsFolder(self._folder, self._single, pin_memory=self._pin_memory)
        view._rename, view._open, view._headers = rename, self._open, self._headers
        return view

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> torch.Tensor:
        """The full tensor, on the CPU, as stored."""
        shape = self.stored(name).shape
        return self.box(name, (0,) * len(shape), shape)

    def names(self) -> list[str]:
        return list(self._files)

    def by_file(self) -> dict[Path, list[str]]:
        """The names of the tensors in each file, in file order."""
        names_by_file: dict[Path, list[str]] = {}
        for name in sorted(self._files, key=self.order):
            names_by_file.setdefault(self._files[name], []).append(name)
        return names_by_file

    def require(self, names: Iterable[str]) -> None:
        require_tensors(names, self._files)

    def stored(self, name: str) -> Stored:
        """Shape, dtype and position of a tensor; reads only the header of its file."""
        file, in_file = self._files[name], self._names_in_files[name]
        header = self._headers(file)
        if in_file not in header:
            raise unreadable(file, f"it lacks {in_file}, which the index places there")
        entry = header[in_file]
        return Stored(entry.shape, DTYPES[entry.dtype], entry.start)

    def order(self, name: str) -> tuple[str, int]:
        """A sort key: the order of tensors in the files."""
        return self._files[name].name, self.stored(name).start

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of a tensor, on the CPU, as stored."""
        entry = self.stored(name)
        width = entry.dtype.itemsize
        raw = torch.empty(
            math.prod(sizes) * width, dtype=torch.uint8, device="cpu", pin_memory=self._pin_memory
        )
        # The tensor's own memory, into which files are read without a copy.
        into = raw.numpy().data
        file, done = self._files[name], 0
        if file not in self._open:
            self._open[file] = os.open(file, os.O_RDONLY)
        for first, count in _runs(entry.shape, offsets, sizes):
            end = done + count * width
            self._fill(self._open[file], into[done:end], entry.start + first * width, name)
            done = end
        return raw.view(entry.dtype).view(tuple(sizes))

    @cached_property
    def _names_in_files(self) -> dict[str, str]:
        return {self._rename(name): name for name in self._unrenamed_files}

    @cached_property
    def _files(self) -> dict[str, Path]:
        files = self._unrenamed_files
        return {name: files[in_file] for name, in_file in self._names_in_files.items()}

    @cached_property
    def _unrenamed_files(self) -> dict[str, Path]:
        return files_by_tensor(self._folder, self._single)

    def _fill(self, descriptor: int, into: memoryview, offset: int, name: str) -> None:
        done = 0
        while done < len(into):
            # May return less: Linux reads at most 2 GiB at a time.
            # By offset: the folders of `renamed` share descriptors, and so would share a file
            # position.
            count = os.preadv(descriptor, [into[done:]], offset + done)
            if not count:
                raise unreadable(self._files[name], f"it ends within {name}")
            done += count


def _runs(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """(first element, count) of the contiguous runs of a tensor that make up a box, in order."""
    if not math.prod(sizes):
        return
    cut = [
        dim
        for dim, (size, full_size) in enumerate(zip(sizes, shape, strict=True))
        if size < full_size
    ]
    # Dimensions after the last cut one are whole, so from it on a run is contiguous.
    depth = cut[-1] if cut else 0
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    count = math.prod(sizes[depth:])
    origin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for index in itertools.product(*(range(size) for size in sizes[:depth])):
        yield origin + sum(i * stride for i, stride in zip(index, strides, strict=False)), count
