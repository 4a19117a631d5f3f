"""Images that text attends to in layers of cross-attention (Llama 3.2 Vision), not features in
place of tokens. B documents of L tokens, I images of a document, T tiles of an image, P patches of
a tile.

transformers gives a document other results beside documents with more images than alone: tokens
before the first image attend to all images of the batch, and without images the layers are skipped.
Here each document has the results that it has alone, and every rank calls every layer.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

PIXELS, RATIOS, TILES = "pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"
"""[B, I, T, C, H, W]; [B, I], 0 for none; [B, I, T], 1 for a tile that is one of the image."""
# [B, L, I, T]: 1 where a token attends to a tile.
MASK = "cross_attention_mask"


def is_cross_attended(config: Any) -> bool:
    """Whether the model of a config attends to images in layers of their own."""
    if not hasattr(config, "vision_config"):
        return False
    text = config.get_text_config(decoder=True)
    return bool(getattr(text, "cross_attention_layers", None))


def keep_apart(model: Any) -> None:
    """Make each document of a batch attend to its own images, in place."""
    for layer in model.modules():
        if hasattr(layer, "cross_attn"):
            tiles = model.config.vision_config.max_num_tiles
            layer.forward = partial(_attend, layer.forward, tiles)


def _attend(forward: Any, tiles: int, hidden_states: torch.Tensor, **inputs: Any) -> torch.Tensor:
    # The output of a layer [B, L, D]; that of documents without images is its input.
    mask, has_any = inputs[MASK], inputs["full_text_row_masked_out_mask"]
    if mask is None:
        return forward(hidden_states, **inputs)
    patches = tiles * inputs["cross_attention_states"].shape[1]
    # The mask is added to scores; rows of tokens without images are zeros.
    sees_B1LI = ((mask == 0) & has_any.bool()).unflatten(3, (-1, patches)).any(-1)
    has_B1I = sees_B1LI.any(2)
    is_masked = ~has_B1I.repeat_interleave(patches, 2)[:, :, None]
    inputs[MASK] = mask.masked_fill(is_masked, torch.finfo(mask.dtype).min)
    return torch.where(has_B1I.any(2)[..., None], forward(hidden_states, **inputs), hidden_states)


def blank_image(config: Any, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of an image that no document has."""
    vision = config.vision_config
    shape = (1, 1, vision.max_num_tiles, vision.num_channels, *2 * (vision.image_size,))
    tiles = like.new_zeros(1, 1, vision.max_num_tiles, dtype=torch.int64)
    tiles[..., 0] = 1
    ratios = like.new_ones(1, 1, dtype=torch.int64)
    return {PIXELS: like.new_zeros(shape, dtype=torch.float32), RATIOS: ratios, TILES: tiles}


def cross_attended(
    ids_BL: torch.Tensor, token: int, media: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What the model is called with for images in the order of their tokens, `media` [images, 1,
    ...], of which a document has as many as it has tokens `token`."""
    is_image_BL = ids_BL == token
    counts_B = is_image_BL.sum(1)
    most = max(int(counts_B.max()), 1)
    here_BI = torch.arange(most, device=ids_BL.device) < counts_B[:, None]
    tensors: dict[str, torch.Tensor] = {}
    for name in (PIXELS, RATIOS, TILES):
        per_image = media[name][:, 0]
        batch = per_image.new_zeros(*here_BI.shape, *per_image.shape[1:])
        if name == TILES:
            batch[..., 0] = 1  # Without a tile the tower's softmax would have no terms.
        if here_BI.any():
            batch[here_BI] = per_image
        tensors[name] = batch
    attends_BLI = _spans(is_image_BL, most) & here_BI[:, None]
    tiles = tensors[TILES].bool() & here_BI[..., None]
    tensors[MASK] = (attends_BLI[..., None] & tiles[:, None]).long()
    return tensors


def _spans(is_image_BL: torch.Tensor, images: int) -> torch.Tensor:
    # Whether a token attends to an image [B, L, I]: from its token on to that of the next image;
    # images whose tokens follow one another end together.
    length = is_image_BL.shape[1]
    positions = torch.arange(length, device=is_image_BL.device)
    spans = is_image_BL.new_zeros(*is_image_BL.shape, images)
    for row, is_image_L in enumerate(is_image_BL):
        starts = positions[is_image_L].tolist()
        ends = [*starts[1:], length] if starts else []
        for image in reversed(range(len(starts) - 1)):
            if ends[image] == starts[image] + 1:
                ends[image] = ends[image + 1]
        for image, (start, end) in enumerate(zip(starts, ends, strict=True)):
            spans[row, start:end, image] = True
    return spans


def layers_of_images(model: nn.Module) -> list[nn.Module]:
    """The layers that are skipped where no document has images."""
    return [layer for layer in model.modules() if hasattr(layer, "cross_attn")]
