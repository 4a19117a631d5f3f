"""Pixels as bytes: the tensor of an image processor is a function of its resized 8-bit pixels.

Rescaling and normalizing give one of 256 values for each channel, and processors for images and
video repeat pixels in time. So one byte stands for `repeats` floats, and a table gives them exactly
the values that the image processor computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class PixelTable:
    """Values of the bytes of each channel. Rows of a tensor (its first dimension) have the pixels
    of one channel after another, each channel `repeats` times."""

    values: Array
    """float32 [channels, 256]."""
    repeats: int = 1

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PixelTable)
            and self.repeats == other.repeats
            and np.array_equal(self.values, other.values)
        )

    def encode(self, pixels: Array) -> Array | None:
        """The bytes of pixels before rescaling, [rows, channels, pixels / repeats]; None if they
        are no bytes, or do not repeat."""
        if pixels.dtype == np.uint8 and self.repeats == 1 and pixels.size:
            return pixels.reshape(len(pixels), len(self.values), -1)
        size = len(self.values) * self.repeats
        if not pixels.size or pixels[0].size % size:
            return None
        blocks = pixels.reshape(len(pixels), len(self.values), self.repeats, -1)
        first = blocks[:, :, 0]
        # The conversion wraps around; the comparison shows values that are no bytes.
        codes = first.astype(np.uint8)
        is_exact = np.array_equal(codes, first) and all(
            np.array_equal(blocks[:, :, index], first) for index in range(1, self.repeats)
        )
        return codes if is_exact else None

    def decode(self, codes: Array, out: Array) -> None:
        """Write the values of bytes to a contiguous float32 tensor."""
        blocks = out.reshape(len(out), len(self.values), self.repeats, -1)
        for channel, values in enumerate(self.values):
            blocks[:, channel] = values[codes[:, channel]][:, None]


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of an image: its values, or the bytes of its pixels."""

    shape: tuple[int, ...]
    content: Array
    table: PixelTable | None = None
    """Table of the bytes in `content`; None if they are the values."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of its values."""
        return self.content.dtype if self.table is None else self.table.values.dtype

    def write_to(self, out: Array) -> None:
        """Write its values to a contiguous array of its shape and type."""
        if self.table is None:
            out[...] = self.content
        else:
            self.table.decode(self.content, out)

    def numpy(self) -> Array:
        """Its values."""
        if self.table is None:
            return self.content
        out = np.empty(self.shape, self.dtype)
        self.write_to(out)
        return out

    def stand_in(self) -> Array:
        """An array of its shape; with its values only if they are not pixels."""
        if self.table is None:
            return self.content
        return np.broadcast_to(np.zeros((), self.dtype), self.shape)


def stored(values: Array) -> StoredTensor:
    """A tensor that is stored with its values."""
    return StoredTensor(values.shape, np.ascontiguousarray(values))


def concatenate(tensors: Sequence[StoredTensor]) -> Array:
    """The tensors along their first dimension; in the others padded with zeros to the largest."""
    shapes = {tensor.shape[1:] for tensor in tensors}
    rows = [tensor.shape[0] for tensor in tensors]
    largest = np.max([*shapes], axis=0).astype(int).tolist()
    out = (np.empty if len(shapes) == 1 else np.zeros)((sum(rows), *largest), tensors[0].dtype)
    start = 0
    for source, size in zip(tensors, rows, strict=True):
        part = out[start : start + size]
        if len(shapes) == 1:
            source.write_to(part)
        else:
            part[tuple(map(slice, source.shape))] = source.numpy()
        start += size
    return out
