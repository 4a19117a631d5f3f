"""Encoded images for tests."""

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image


def picture(
    seed: int, width: int = 60, height: int = 40, kind: str = "PNG", **options: Any
) -> bytes:
    """An image of random blocks, which JPEG changes little."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 5, 3)).astype(np.uint8)
    image = Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC)
    return encoded(image, kind, **options)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image file."""
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is this large, and holds next to nothing."""

    def chunk(name: bytes, content: bytes) -> bytes:
        check = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 10)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data
