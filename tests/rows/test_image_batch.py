"""Tensors of a micro-batch's images."""

import numpy as np
import pytest
import torch

from penstock.rows.image_batch import ImageBatch
from penstock.rows.pixel_table import PixelTable, StoredTensor, stored
from penstock.rows.reader import RowImage


def test_images_of_other_sizes_are_padded_with_zeros_to_the_largest():
    sizes = [(4, 6), (8, 2)]
    images = [
        RowImage(
            {
                "pixel_values": stored(np.ones((1, 3, *size))),
                "image_sizes": stored(np.array([size])),
            },
            2,
        )
        for size in sizes
    ]
    found = ImageBatch.concatenate(images)
    assert found is not None
    assert found.token_counts == (2, 2)
    tensors = found.to_device(torch.device("cpu"))
    assert tensors["image_sizes"].tolist() == [[4, 6], [8, 2]]
    pixels = tensors["pixel_values"]
    assert pixels.shape == (2, 3, 8, 6)
    for one, (height, width) in zip(pixels, sizes, strict=True):
        assert torch.equal(one[:, :height, :width], torch.ones(3, height, width).double())
        assert one.sum() == 3 * height * width


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("like", [(), (2, 3)], ids=["grids", "squares"])
def test_bytes_of_pixels_are_looked_up_as_the_table_says_unless_images_are_padded(repeats, like):
    generator = np.random.default_rng(0)
    values = generator.normal(size=(3, 256)).astype(np.float32)
    table, pixels = PixelTable(values, repeats), 6
    parts = []
    for rows in (2, 5):
        codes = generator.integers(0, 256, (rows, 3, pixels)).astype(np.uint8)
        size = (3 * repeats, *like) if like else (3 * repeats * pixels,)
        own = PixelTable(values.copy(), repeats)  # as each file has its own
        parts.append(StoredTensor((rows, *size), codes, own if rows == 5 else table))
    found = ImageBatch.concatenate([RowImage({"pixel_values": each}, 1) for each in parts])
    assert found is not None
    assert not found.tensors
    assert found.pixels["pixel_values"].codes_RCP.dtype == torch.uint8
    wanted = np.concatenate([each.numpy() for each in parts])
    assert torch.equal(
        found.to_device(torch.device("cpu"))["pixel_values"], torch.from_numpy(wanted)
    )
    other = StoredTensor(parts[0].shape, parts[0].content, PixelTable(values + 1, repeats))
    mixed = ImageBatch.concatenate([RowImage({"pixel_values": x}, 1) for x in (*parts, other)])
    assert mixed is not None
    assert not mixed.pixels
    assert mixed.tensors["pixel_values"][-2:].numpy().tobytes() == other.numpy().tobytes()
