"""The arguments with which transformers' multimodal models are called. B documents of L tokens."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from penstock.models.automodel.media.cross_attention import cross_attended, is_cross_attended

Tensors = Mapping[str, torch.Tensor]

IMAGE_TYPES = ("token_type_ids", "moe_mm_token_type_ids")
"""Arguments that are 1 at image tokens and 0 elsewhere."""

MEDIA_TYPES = "mm_token_type_ids"
# The argument that has these values at the tokens of each kind and 0 elsewhere, as
# `ProcessorMixin.create_mm_token_type_ids`.
MEDIA_TYPE_IDS = {"image": 1, "audio": 3}

# Model types where token type 0 sees all tokens of its type, and 1 only those before it: image
# tokens are 0 and text is 1.
CAUSAL_TYPE = ("paligemma",)

# The argument with the number of images of each sample.
NUM_IMAGES = "batch_num_images"


class OneOfSeveral(int):
    """An image of a sample with several, as an element of `batch_num_images`: it counts as one
    image, but does not equal 1, with which an image is cut into tiles."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def with_each_counted(media: Tensors) -> dict[str, Any]:
    """The tensors with `batch_num_images` as transformers takes it for images in any order: its
    models read from it only which images are alone in their sample (1 in the tensor)."""
    inputs: dict[str, Any] = dict(media)
    if NUM_IMAGES in media:
        counts = media[NUM_IMAGES].tolist()
        inputs[NUM_IMAGES] = [1 if count == 1 else OneOfSeveral(1) for count in counts]
    return inputs


def media_inputs(
    model: nn.Module,
    ids_BL: torch.Tensor,
    here_BL: torch.Tensor,
    token_ids: Mapping[str, int],
    media: Tensors | None,
) -> dict[str, Any]:
    """What a model's forward takes of a padded batch beside the token ids.

    Args:
        model: the model, or its part without the head.
        ids_BL: token ids.
        here_BL: true where there is a token, false in the padding.
        token_ids: the token that takes a feature, by the kind of media.
        media: outputs of the processors for all media, in the order of their tokens; None without
            media.
    """
    model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
    is_image_BL = ids_BL == token_ids.get("image", -1)
    types_BL = (~is_image_BL if model_type in CAUSAL_TYPE else is_image_BL).long()
    names = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {"attention_mask": here_BL.long()}
    inputs |= {name: types_BL for name in IMAGE_TYPES if name in names}
    if MEDIA_TYPES in names:
        inputs[MEDIA_TYPES] = sum(
            (MEDIA_TYPE_IDS[kind] * (ids_BL == token) for kind, token in token_ids.items()),
            torch.zeros_like(ids_BL),
        )
    if media is None:
        return inputs
    # Processors return fp32; the towers compute in the dtype of their parameters.
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    media = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in media.items()
    }
    if is_cross_attended(getattr(model, "config", None)):
        return inputs | cross_attended(ids_BL, token_ids["image"], media)
    return inputs | with_each_counted(media)


def join_media(media: Iterable[Tensors]) -> dict[str, torch.Tensor]:
    """The outputs of the processors for several media, along their first dimension."""
    tensors_by_name: dict[str, list[torch.Tensor]] = {}
    for sample in media:
        for name, tensor in sample.items():
            tensors_by_name.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in tensors_by_name.items()}
