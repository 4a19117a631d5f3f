"""What is decoded, and what is refused with which words."""

from contextlib import suppress
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from penstock.media.decode import BadImage, decode, read_header
from tests.media.pictures import IMAGES, picture, png_header

pytestmark = pytest.mark.filterwarnings("ignore:Palette images with Transparency")


@pytest.mark.parametrize("kind", IMAGES)
def test_images_are_decoded_as_transformers_does(kind):
    content = IMAGES[kind]()
    mine, its = decode(content), load_image(Image.open(BytesIO(content)))
    assert np.array_equal(np.asarray(mine), np.asarray(its))
    assert mine.mode == "RGB"


def test_an_image_is_rotated_as_its_exif_data_says():
    content = IMAGES["jpeg turned"]()
    assert (read_header(content).width, decode(content).width) == (60, 40)


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


@pytest.mark.parametrize("kind", IMAGES)
def test_a_damaged_image_is_decoded_or_refused_whatever_its_decoder_raises(kind):
    content = IMAGES[kind]()
    for start in range(0, len(content), 1 + len(content) // 40):
        with suppress(BadImage):
            decode(content[:start] + bytes(8) + content[start + 8 :])
