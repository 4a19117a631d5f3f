"""What is decoded, and what is refused with which words."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from penstock.media.decode import BadImage, decode, read_header
from tests.media.pictures import encoded, picture, png_header


def rotation():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def rotated():
    return picture(1, kind="JPEG", exif=rotation())


def palette():
    return encoded(Image.open(BytesIO(picture(2))).convert("P"), "PNG")


def cmyk():
    return encoded(Image.open(BytesIO(picture(3))).convert("CMYK"), "JPEG")


def animated():
    frames = [Image.open(BytesIO(picture(seed))) for seed in (4, 5)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


def transparent():
    return encoded(Image.open(BytesIO(picture(6))).convert("RGBA"), "PNG")


@pytest.mark.parametrize(
    "make", [rotated, palette, cmyk, animated, transparent], ids=lambda f: f.__name__
)
def test_images_are_decoded_as_transformers_does(make):
    content = make()
    mine, its = decode(content), load_image(Image.open(BytesIO(content)))
    assert np.array_equal(np.asarray(mine), np.asarray(its))
    assert mine.mode == "RGB"


def test_an_image_is_rotated_as_its_exif_data_says():
    assert (read_header(rotated()).width, decode(rotated()).width) == (60, 40)


BAD = {
    "empty": (b"", "it is empty"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG drawing"),
    "html": (b"<!DOCTYPE html><p>", "an HTML page"),
    "pdf": (b"%PDF-1.7", "a PDF file"),
    "text": (b"hello", r"not an image that can be decoded \(known are JPEG, PNG"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    "huge": (png_header(20_000, 20_000), "too many pixels; 89,478,485 are allowed"),
    "large": (png_header(10_000, 9_500), "10,000 x 9,500 pixels, 95,000,000 together"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_image_is_refused_by_its_header(name):
    content, why = BAD[name]
    with pytest.raises(BadImage, match=why):
        read_header(content)


def test_a_truncated_image_is_refused_when_it_is_decoded():
    content = picture(1, 200, 200, "JPEG")
    assert read_header(content[:2000]).width == 200
    with pytest.raises(BadImage, match="damaged: image file is truncated"):
        decode(content[: len(content) // 2])
