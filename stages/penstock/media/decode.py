"""Decode images: bytes to RGB, exactly as transformers' `load_image`.

Size and format are read from the header, before anything is decoded. Formats whose decoders run
other programs (EPS) or that are no images (SVG, PDF) are refused.
"""

import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING

from penstock.core.errors import CapabilityError
from penstock.media.kinds import MAX_BYTES, BadMedia, first_line

if TYPE_CHECKING:
    from PIL.Image import Image

# Maximum pixels of an image: the number from which Pillow warns of decompression bombs.
MAX_PIXELS = 89_478_485

FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")


class BadImage(BadMedia):
    """The image cannot be used."""


@dataclass(frozen=True)
class ImageHeader:
    """What an image's header says."""

    format: str
    width: int
    height: int


def require_pillow() -> None:
    """Raise CapabilityError without Pillow."""
    if find_spec("PIL") is None:
        raise CapabilityError(
            "The data has images, and Pillow, which decodes them, is not installed.\n"
            "  pip install 'penstock[vision]'"
        )


def read_header(content: bytes) -> ImageHeader:
    """Format and size of an image. Raises BadImage if it is none, or too large."""
    with _open(content) as image:
        return ImageHeader(str(image.format), image.width, image.height)


def decode(content: bytes) -> "Image":
    """The image in RGB, rotated as its EXIF data says; of an animation, the first frame. Raises
    BadImage if it cannot be decoded."""
    from PIL import ImageOps  # noqa: PLC0415 - optional

    with _open(content) as image:
        try:
            ImageOps.exif_transpose(image, in_place=True)
            # Pillow decodes here, not when it opens the file, so damage shows here.
            image.load()
            return image if image.mode == "RGB" else image.convert("RGB")
        except Exception as error:  # its plug-ins raise errors of any type
            raise BadImage(f"it is damaged: {first_line(error)}") from error


def _open(content: bytes) -> "Image":
    from PIL import Image  # noqa: PLC0415 - optional

    if not content:
        raise BadImage("it is empty")
    if len(content) > MAX_BYTES:
        raise BadImage(f"it has {len(content):,} bytes; {MAX_BYTES:,} are allowed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            Image.init()  # registers the formats
            # Of a format that it was built without, such as AVIF, Image.open raises KeyError.
            formats = [name for name in FORMATS if name in Image.OPEN]
            image = Image.open(BytesIO(content), formats=formats)
    # Raised above twice the pixels of which Pillow warns.
    except Image.DecompressionBombError as error:
        raise BadImage(f"it has too many pixels; {MAX_PIXELS:,} are allowed") from error
    except Exception as error:  # its plug-ins raise errors of any type
        raise BadImage(f"it is {_name_content(content)}") from error
    pixels = image.width * image.height
    if pixels > MAX_PIXELS:
        size = f"{image.width:,} x {image.height:,} pixels"
        raise BadImage(f"it has {size}, {pixels:,} together; {MAX_PIXELS:,} are allowed")
    return image


def _name_content(content: bytes) -> str:
    head = content[:512].lstrip().lower()
    if b"<svg" in head:
        return "an SVG drawing, which is not decoded; save it as PNG"
    if head.startswith((b"<!doctype html", b"<html")):
        return "an HTML page, not an image"
    if head.startswith(b"%pdf"):
        return "a PDF file, not an image"
    formats = ", ".join(name for name in FORMATS if name != "MPO")
    return f"not an image that can be decoded (known are {formats})"
