"""The smallest image that a vision part computes features of."""

from collections.abc import Mapping

import torch

from penstock.models.vision.tower import VisionTower


def dummy_image(tower: VisionTower) -> Mapping[str, torch.Tensor]:
    """Arguments of `get_image_features` for one blank image.

    Micro-batches without images take it, so that all ranks gather and reduce the vision part's
    weights in the same order, and each of its parameters has a gradient: of zeros, as no token
    takes its features.
    """
    hf, form = tower.hf_model.config, tower.config.type.form
    vision = hf.vision_config
    if form == "grid":
        merge_size = tower.config.merge_size
        channels = getattr(vision, "in_channels", 3)
        frames = getattr(vision, "temporal_patch_size", 1)
        size = channels * frames * vision.patch_size**2
        return {
            "pixel_values": torch.zeros(merge_size**2, size),
            "image_grid_thw": torch.tensor([[1, merge_size, merge_size]]),
        }
    channels = getattr(vision, "num_channels", 3)
    if form == "native":
        feature_size = vision.patch_size * hf.spatial_merge_size
        # Of a single feature transformers would drop the dimension.
        return {
            "pixel_values": torch.zeros(1, channels, 2 * feature_size, feature_size),
            "image_sizes": torch.tensor([[2 * feature_size, feature_size]]),
        }
    sides = vision.image_size
    height, width = (sides, sides) if isinstance(sides, int) else sides
    if form == "square":
        return {"pixel_values": torch.zeros(1, channels, height, width)}
    if form == "crops":
        # Crops of zeros are padding.
        return {"pixel_values": torch.ones(1, 1, channels, height, width)}
    # More than one tile, so that the parameter between rows of tiles is used as well.
    from transformers.models.llava_next.modeling_llava_next import (  # noqa: PLC0415
        image_size_to_num_patches,
    )

    tiles = image_size_to_num_patches([height, width], hf.image_grid_pinpoints, height)
    return {
        "pixel_values": torch.zeros(1, tiles, channels, height, width),
        "image_sizes": torch.tensor([[height, width]]),
    }
