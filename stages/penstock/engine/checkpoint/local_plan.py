"""Local save plans: the boxes that one rank holds, in a few kilobytes for rank 0.

DCP's own plans have an object for each box. Here the tensors are one compressed table, which is the
same on all ranks of a pipeline stage, and the boxes are one compressed array of integers.
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

# Milliseconds on each rank, and half as many bytes for rank 0 as at the fastest level.
_LEVEL = 9


class BoxShape(NamedTuple):
    """Position and size of a box in its tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class HeldTensor(NamedTuple):
    """A tensor of which a rank holds boxes."""

    name: str
    dtype: torch.dtype
    """The dtype in the file."""
    shape: tuple[int, ...]
    num_boxes: int


@dataclass(frozen=True)
class LocalPlan:
    """The boxes of one rank."""

    tensors: bytes
    """Compressed JSON: name, dtype, shape and number of boxes of each tensor."""
    boxes: bytes
    """Compressed integers: the offsets and the sizes of each box, tensor by tensor."""

    @classmethod
    def of(cls, held: Mapping[HeldTensor, Sequence[BoxShape]]) -> "LocalPlan":
        table = [
            (tensor.name, str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.num_boxes)
            for tensor in held
        ]
        numbers = [
            number
            for boxes in held.values()
            for box in boxes
            for number in (*box.offsets, *box.sizes)
        ]
        return cls(zlib.compress(json.dumps(table).encode(), _LEVEL), pack_integers(numbers))

    def read_tensors(self) -> list[HeldTensor]:
        return [
            HeldTensor(name, _dtype_named(dtype), tuple(shape), num_boxes)
            for name, dtype, shape, num_boxes in json.loads(zlib.decompress(self.tensors))
        ]

    def read_boxes(self) -> NDArray[np.int64]:
        return unpack_integers(self.boxes)


def pack_integers(numbers: Iterable[int]) -> bytes:
    """Compress integers of 64 bits."""
    return zlib.compress(np.fromiter(numbers, "<i8").tobytes(), _LEVEL)


def unpack_integers(data: bytes) -> NDArray[np.int64]:
    """The integers of `pack_integers`, read-only."""
    return np.frombuffer(zlib.decompress(data), "<i8")


def _dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return dtype
