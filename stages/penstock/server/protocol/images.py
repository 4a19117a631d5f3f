"""Processed images in messages."""

from typing import Literal, get_args

import numpy as np

from penstock.rows.pixel_table import PixelTable, StoredTensor
from penstock.server.protocol.types import Array, Value

ImageDType = Literal["bool", "uint8", "int32", "int64", "float32", "float64"]
DTYPES: dict[str, ImageDType] = {name: name for name in get_args(ImageDType)}


class ImageTensor(Value):
    """An output of the image processor for one image (`rows.pixel_table.StoredTensor`)."""

    shape: tuple[int, ...]
    content_shape: tuple[int, ...]
    dtype: ImageDType  # Numpy name of the type of `content`; little-endian
    content: bytes
    values: Array | None = None
    """float32 [channels, 256]: `content` are bytes of pixels, whose values these are."""
    repeats: int = 1

    @classmethod
    def of(cls, tensor: StoredTensor) -> "ImageTensor":
        """Copy a tensor. Raises KeyError for a type that no message has."""
        content, table = tensor.content, tensor.table
        return cls(
            shape=tensor.shape,
            content_shape=content.shape,
            dtype=DTYPES[content.dtype.name],
            content=content.astype(content.dtype.newbyteorder("<"), copy=False).tobytes(),
            values=None if table is None else Array.of(table.values, "float32"),
            repeats=1 if table is None else table.repeats,
        )

    def stored(self) -> StoredTensor:
        """The tensor, read-only. Raises ValueError if the content does not fill its shape."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        content = np.frombuffer(self.content, dtype).reshape(self.content_shape)
        if self.values is None:
            return StoredTensor(self.shape, content)
        table = PixelTable(self.values.numpy(), self.repeats)
        return StoredTensor(self.shape, content, table)


class Image(Value):
    """An image as the model takes it."""

    digest: bytes  # Of its file
    tensors: dict[str, ImageTensor]  # Outputs of the image processor, by name
    num_tokens: int  # Number of image tokens that take its features

    @property
    def num_bytes(self) -> int:
        return sum(len(tensor.content) for tensor in self.tensors.values())
