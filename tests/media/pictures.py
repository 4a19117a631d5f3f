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
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = (
        png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(b"\0" * 10))
        + png_chunk(b"IEND", b"")
    )
    return b"\x89PNG\r\n\x1a\n" + data


def png_chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)


def _image(mode: str) -> Image.Image:
    if mode == "I;16":
        return Image.fromarray(np.arange(2400, dtype=np.uint16).reshape(40, 60) * 27)
    return Image.open(BytesIO(picture(1))).convert(mode)


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def _frames(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    frames = [Image.open(BytesIO(picture(seed))).convert(mode) for seed in range(3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)


def _transparent_palette() -> bytes:
    return encoded(_image("P"), "PNG", transparency=bytes(range(256)))


IMAGES = {
    "png": lambda: picture(1),
    "png 16 bit": lambda: encoded(_image("I;16"), "PNG"),
    "png palette": _transparent_palette,
    "png animated": lambda: _frames("PNG"),
    "png transparent, turned": lambda: encoded(_image("RGBA"), "PNG", exif=exif_of(7)),
    "jpeg turned": lambda: picture(2, kind="JPEG", exif=exif_of(6)),
    "jpeg cmyk": lambda: encoded(_image("CMYK"), "JPEG"),
    "jpeg progressive": lambda: picture(3, kind="JPEG", progressive=True),
    "webp": lambda: picture(4, kind="WEBP"),
    "webp animated": lambda: _frames("WEBP", "RGBA", lossless=True),
    "gif animated": lambda: _frames("GIF", "P", transparency=3),
    "bmp": lambda: picture(5, kind="BMP"),
    "tiff": lambda: picture(6, kind="TIFF", compression="tiff_lzw", exif=exif_of(3)),
    "tiff 16 bit": lambda: encoded(_image("I;16"), "TIFF"),
    "tiff cmyk": lambda: encoded(_image("CMYK"), "TIFF", compression="tiff_adobe_deflate"),
    "ppm": lambda: picture(7, kind="PPM"),
}
"""An image of each kind."""

if "AVIF" in Image.registered_extensions().values():  # from Pillow 11.3 on
    IMAGES["avif"] = lambda: picture(8, kind="AVIF")
