"""Safetensors writer: compute the file layout first, then write tensors in pieces.

Offsets follow from shapes and dtypes, so only the tensor being written is in memory.
`penstock.core.safetensors_header` describes the format.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engine.hf.safetensors_reader import DTYPES, Stored

FORMAT_OF = {dtype: name for name, dtype in DTYPES.items()}

Kind = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Layout:
    """The offsets of everything in a file, and its size in bytes."""

    header: bytes
    tensors: Mapping[str, Stored]
    size: int


def file_layout(kinds: Mapping[str, Kind]) -> Layout:
    """The layout of a file with these tensors, in the given order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    offset = 0
    for name, (shape, dtype) in kinds.items():
        starts[name], end = offset, offset + tensor_num_bytes((shape, dtype))
        span = [offset, end]
        entries[name] = {"dtype": FORMAT_OF[dtype], "shape": list(shape), "data_offsets": span}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The format fills its header up with spaces, so that data begins at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    tensors = {
        name: Stored(shape, dtype, len(header) + starts[name])
        for name, (shape, dtype) in kinds.items()
    }
    return Layout(header, tensors, len(header) + offset)


def aligned(kinds: Mapping[str, Kind]) -> dict[str, Kind]:
    """Sort the tensors so that each is aligned to its element size."""
    # Wide elements first, as the safetensors library (0.8) orders them, and no padding is needed.
    return dict(sorted(kinds.items(), key=lambda item: (-item[1][1].itemsize, item[0])))


def tensor_num_bytes(kind: Kind) -> int:
    """The bytes of such a tensor."""
    shape, dtype = kind
    return math.prod(shape) * dtype.itemsize


def put(file: int, tensor: torch.Tensor, offset: int) -> None:
    """Write a tensor's elements to an open file from byte `offset` on."""
    # As bytes: numpy has neither bfloat16 nor float8.
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy().data
    while raw:
        count = os.pwrite(file, raw, offset)
        raw, offset = raw[count:], offset + count
