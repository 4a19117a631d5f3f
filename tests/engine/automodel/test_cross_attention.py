"""Images in layers of cross-attention: masks as the processor's, results as of each document."""

import numpy as np
import pytest
import torch
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from penstock.models.automodel.media.cross_attention import cross_attended

IMAGE, TILES = 9, 4


@pytest.mark.parametrize(
    "tokens",
    [
        [1, IMAGE, 2, 3, 4],
        [IMAGE, 2, IMAGE, 3, 4],
        [1, IMAGE, IMAGE, 2, IMAGE],
        [1, 2, IMAGE, IMAGE, IMAGE],
    ],
)
def test_tokens_attend_to_the_images_that_the_processor_says(tokens):
    count = tokens.count(IMAGE)
    tiles = [1 + number % TILES for number in range(count)]
    media = {
        "pixel_values": torch.ones(count, 1, TILES, 3, 2, 2),
        "aspect_ratio_ids": torch.ones(count, 1, dtype=torch.int64),
        "aspect_ratio_mask": (torch.arange(TILES) < torch.tensor(tiles)[:, None])[:, None].long(),
    }
    ids_BL = torch.tensor([[1] * len(tokens), tokens])
    found = cross_attended(ids_BL, IMAGE, media)
    wanted = convert_sparse_cross_attention_mask_to_dense(
        [get_cross_attention_token_mask(tokens, IMAGE)], [tiles], TILES, len(tokens)
    )
    assert np.array_equal(found["cross_attention_mask"][1:].numpy(), wanted)
    assert not found["cross_attention_mask"][0].any()
    assert found["aspect_ratio_ids"].tolist() == [[0] * count, [1] * count]
    assert found["aspect_ratio_mask"][0].tolist() == [[1, 0, 0, 0]] * count
