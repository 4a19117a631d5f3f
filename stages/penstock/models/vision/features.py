"""Features of images that were computed before training, in place of the images.

Of a projector that is not trained its outputs are stored; of one that is trained, its inputs, on
which only the projector is called in a step. F image features, D width of the language model.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from penstock.core.errors import CapabilityError
from penstock.models.vision.types import VisionConfig

if TYPE_CHECKING:
    from penstock.models.vision.tower import VisionTower

FEATURES = "image_features"
"""The features of an image [F, D]."""
# Beginning of the names of the features [F, D] that are added after decoder layers; its number.
DEEPSTACK = "deepstack_features."
# What the projector takes of an image.
HIDDEN = "projector_inputs"
PIXELS = "pixel_values"
SECONDS = "second_per_grid_ts"
"""Seconds of a temporal patch of each video, on which positions depend, and no features."""

PROJECTORS: Mapping[str, str] = {
    "idefics3": "connector",
    "internvl": "multi_modal_projector",
    "llava": "multi_modal_projector",
    "qwen2_vl": "visual.merger",
    "smolvlm": "connector",
}
"""The projectors, by model type, that are one module whose outputs are the features as they are."""


@torch.no_grad()
def encode_images(
    tower: "VisionTower", tensors: Mapping[str, torch.Tensor], *, projected: bool
) -> dict[str, torch.Tensor]:
    """What is stored of images: the features, or the projector's inputs; and their other tensors.
    `tensors` are the arguments of `get_image_features`."""
    # Grids and sizes of images are needed for positions, whatever is stored of the pixels.
    inputs = {name: tensor for name, tensor in tensors.items() if name != PIXELS}
    if not projected:
        return {HIDDEN: _projector_inputs(tower, tensors), **inputs}
    outputs = tower.compute(tensors)
    deepstack = {f"{DEEPSTACK}{layer}": feature for layer, feature in enumerate(outputs[1])}
    return {FEATURES: outputs[0], **deepstack, **inputs}


def stored_features(
    tower: "VisionTower", tensors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    """(features [F, D], those after decoder layers) of stored images; None for images that are
    not."""
    if HIDDEN in tensors:
        return find_projector(tower)(_floats(tensors[HIDDEN])).flatten(0, -2), ()
    if FEATURES not in tensors:
        return None
    count = sum(name.startswith(DEEPSTACK) for name in tensors)
    deepstack = tuple(_floats(tensors[f"{DEEPSTACK}{layer}"]) for layer in range(count))
    return _floats(tensors[FEATURES]), deepstack


def require_projector(config: VisionConfig) -> str:
    """The name of the projector that is called on stored inputs.

    Raises CapabilityError where it is more than one module, or something follows it.
    """
    model_type = str(config.hf_config.get("model_type"))
    if model_type not in PROJECTORS:
        raise CapabilityError(
            "data.encode_images is true and model.freeze leaves the projector trained, which of"
            f" models of type {model_type} is not called on stored inputs (it is of"
            f" {', '.join(PROJECTORS)}).\n"
            "  Write model.freeze: [vision, projector], or encode_images: false."
        )
    return PROJECTORS[model_type]


def find_projector(tower: "VisionTower") -> nn.Module:
    """The projector that is called on stored inputs. Raises as `require_projector`."""
    return tower.get_submodule(require_projector(tower.config))


def dummy_image(tower: "VisionTower") -> Mapping[str, torch.Tensor]:
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


def dummy_hidden(tower: "VisionTower") -> dict[str, torch.Tensor]:
    """Inputs of the projector for one feature, for micro-batches without images."""
    [first, *_] = [parameter for parameter in find_projector(tower).parameters() if parameter.dim()]
    width, per_feature = first.shape[-1], tower.config.merge_size**2
    if tower.config.type.form == "crops":
        joined = tower.hf_model.config.scale_factor**2
        return {HIDDEN: torch.zeros(1, joined, width // joined)}
    shape = (1, width) if tower.config.type.form == "square" else (width,)
    return {HIDDEN: torch.zeros(per_feature, *shape)}


def drop_encoder(tower: "VisionTower", *, projected: bool) -> None:
    """Remove the modules that stored features make unnecessary, in place: all, or all but the
    projector."""
    names = [name for name, _ in tower.named_parameters()]
    kept_names = [name for name in names if not projected and tower.config.is_projector(name)]

    def drop(module: nn.Module, path: str) -> None:
        for leaf, child in [*module.named_children()]:
            inner = f"{path}{leaf}."
            if not any(name.startswith(inner) for name in kept_names):
                delattr(module, leaf)
            elif not tower.config.is_projector(inner):
                drop(child, inner)

    drop(tower, "")
    for name in [
        name for name, _ in tower.named_parameters(recurse=False) if name not in kept_names
    ]:
        delattr(tower, name)
    buffers = {name for name, _ in tower.named_buffers(remove_duplicate=False)}
    tower.buffer_values = {
        name: value for name, value in tower.buffer_values.items() if name in buffers
    }


def _projector_inputs(tower: "VisionTower", tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    inputs: list[torch.Tensor] = []
    hook = find_projector(tower).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        tower.compute(tensors)
    finally:
        hook.remove()
    [hidden] = inputs
    return hidden


def _floats(stored: torch.Tensor) -> torch.Tensor:
    # Stored bfloat16, for which NumPy has no type, is read as int16.
    return stored.view(torch.bfloat16) if stored.dtype == torch.int16 else stored
