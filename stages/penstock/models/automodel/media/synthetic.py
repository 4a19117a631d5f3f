"""Media as the processor of a model returns them, made of noise: no processor is needed.

What a processor returns is told apart by the names that the model's forward takes, and tried: the
first form of which the model makes features is taken. P patches, C channels, S side of an image; M
mel bins, F frames.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from penstock.core.errors import CapabilityError
from penstock.models.automodel.media.cross_attention import (
    PIXELS,
    RATIOS,
    TILES,
    is_cross_attended,
)
from penstock.models.automodel.media.tiny_media import PATCHES

Tensors = dict[str, torch.Tensor]
Form = tuple[str, Callable[[int], Tensors]]
"""A name, and what makes the tensors of an image or of audio from its number."""

AUDIO_CONFIGS = ("audio_config", "encoder_config")
MASKS = ("feature_attention_mask", "input_features_mask")
# Frames of a position of the tower.
STRIDE = 2

Kind = Literal["image", "audio"]
KINDS: tuple[Kind, ...] = ("image", "audio")

VISION_CONFIGS = ("vision_config", "visual_config", "vq_config", "vision_tower_config")


@dataclass(frozen=True)
class MediaMaker:
    """Makes media of one kind for one model."""

    kind: Kind
    form: str
    make: Callable[[int], Tensors]
    count: Callable[[Tensors], int]

    def make_one(self, number: int) -> tuple[Tensors, int]:
        """The tensors of an image or of audio, and the number of its features; those of different
        numbers may have different sizes."""
        tensors = self.make(number)
        return tensors, self.count(tensors)


def find_maker(model: Any, kind: Kind = "image") -> MediaMaker:
    """What makes media of this kind for this model.

    Raises CapabilityError with the reason if there is no form of which it makes features.
    """
    if kind == "image" and is_cross_attended(model.config):
        make = partial(_attended_tiles, model.config.vision_config)
        return MediaMaker(kind, "tiles", make, lambda _: 1)
    count = partial(_count_features, model, kind)
    if _features(model, kind) is None:
        # Qwen2-Audio makes features of audio within its forward alone.
        tower = model.get_encoder(modality="audio") if kind == "audio" else None
        if not hasattr(tower, "_get_feat_extract_output_lengths"):
            raise CapabilityError(f"it has no get_{kind}_features")
        count = partial(_count_lengths, tower)
    why = ""
    for form, make in _forms(model) if kind == "image" else audio_forms(model):
        maker = MediaMaker(kind, form, make, count)
        try:
            if all(maker.make_one(number)[1] for number in range(2)):
                return maker
            why = f"{form}: no features"
        except Exception as error:  # noqa: BLE001 - the form is another
            why = f"{form}: {(str(error).splitlines() or [type(error).__name__])[0]}"
    subject = "images were" if kind == "image" else "audio was"
    raise CapabilityError(f"no {subject} found that it takes ({why})")


def _attended_tiles(vision: Any, number: int) -> Tensors:
    # An image of one tile, or of two side by side, padded to as many as an image may have.
    tiles, count = torch.zeros(1, 1, vision.max_num_tiles, dtype=torch.int64), 1 + number % 2
    tiles[..., :count] = 1
    image_size = vision.image_size
    pixels = noise(number, *tiles.shape, vision.num_channels, image_size, image_size)
    ratio = vision.supported_aspect_ratios.index([1, count]) + 1
    return {
        PIXELS: pixels * tiles[..., None, None, None],
        RATIOS: torch.full((1, 1), ratio),
        TILES: tiles,
    }


@torch.no_grad()
def _count_features(model: Any, kind: Kind, tensors: Tensors) -> int:
    features = _features(model, kind)
    params = inspect.signature(features).parameters
    takes_any = any(param.kind is param.VAR_KEYWORD for param in params.values())
    kwargs = {k: v for k, v in tensors.items() if takes_any or k in params}
    outputs = features(**kwargs, return_dict=True)
    return next(filter(None, map(count_features, _outputs(outputs))), 0)


def _count_lengths(tower: Any, tensors: Tensors) -> int:
    # The number of features of audio by its mask, as the tower counts them.
    frames = tensors["feature_attention_mask"].sum(-1)
    return int(tower._get_feat_extract_output_lengths(frames)[1].sum())


def _outputs(outputs: Any) -> Iterator[Any]:
    if not hasattr(outputs, "pooler_output"):
        yield outputs
        return
    yield outputs.pooler_output
    yield (getattr(outputs, "deepstack_features", None) or [None])[0]
    yield outputs.last_hidden_state


def _features(model: Any, kind: Kind) -> Any:
    # The method that makes features; None without one. It may be that of the base model, whose
    # arguments are then named.
    methods = [
        getattr(module, f"get_{kind}_features", None) for module in (model.base_model, model)
    ]
    return next((method for method in methods if method is not None), None)


def count_features(features: Any) -> int:
    """The number of vectors in the features of images: a tensor, or a list of those of each."""
    if isinstance(features, torch.Tensor):
        return features.shape[:-1].numel()
    return sum(map(count_features, features)) if isinstance(features, list | tuple) else 0


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a model's images."""

    patch: int
    whole_patch: int
    """The side of several patches that are one feature."""
    channels: int
    image_size: int
    high_image_size: int
    """Of the image in its higher resolution."""
    times: int
    """Frames of a patch."""
    merge: int

    @property
    def pixels(self) -> int:
        return self.channels * self.patch**2

    def square(self, number: int, *before: int, image_size: int = 0) -> torch.Tensor:
        """An image, with dimensions of 1 or more before it."""
        image_size = image_size or self.image_size
        return noise(number, *before, self.channels, image_size, image_size)


def _sizes(config: Any) -> _Sizes:
    vision = next((v for n in VISION_CONFIGS if (v := getattr(config, n, None))), config)
    patch = _first(vision, "patch_size", "image_patch_size") or _first(config, "patch_size") or 8
    image_size = _first(vision, "image_size") or PATCHES * patch
    high = getattr(config, "high_res_vision_config", vision)
    return _Sizes(
        patch,
        _first(vision, "model_patch_size") or patch,
        _first(vision, "num_channels", "in_channels", "in_chans") or 3,
        image_size,
        _first(high, "image_size") or image_size,
        _first(vision, "temporal_patch_size", "patch_temporal") or 1,
        _first(vision, "spatial_merge_size") or 1,
    )


def _forms(model: Any) -> Iterator[Form]:
    sizes, names = _sizes(model.config), {*inspect.signature(model.forward).parameters}
    if names & {"image_grid_thw", "image_grid_hw"}:
        yield from _grids(sizes, names)
    yield from _patches(sizes, names)
    has_tiles = bool(getattr(model.config, "image_grid_pinpoints", None))
    yield from _tiles(sizes, names, has_tiles=has_tiles)


def _grids(sizes: _Sizes, names: set[str]) -> Iterator[Form]:
    # Patches of images of any size one after another.
    pixels, patch, square = sizes.pixels, sizes.patch, sizes.merge * sizes.patch
    for shape in (
        (sizes.times * pixels,),
        (pixels,),
        (sizes.channels, patch, patch),
        (2 * pixels,),
        (square, square, sizes.channels),
    ):
        yield "grid", partial(_grid, shape, names)


def _grid(shape: tuple[int, ...], names: set[str], number: int) -> Tensors:
    height, width = PATCHES, PATCHES * (1 + number % 2)
    inputs = {"pixel_values": noise(number, height * width, *shape)}
    if "image_grid_hw" in names:
        return inputs | {"image_grid_hw": torch.tensor([[height, width]])}
    inputs["image_grid_thw"] = torch.tensor([[1, height, width]])
    if "image_merge_sizes" in names:
        inputs["image_merge_sizes"] = torch.tensor([2])
    return inputs


def _patches(sizes: _Sizes, names: set[str]) -> Iterator[Form]:
    # Patches of one image after another, padded to as many.
    count = PATCHES**2
    if "spatial_shapes" in names:
        shapes = {
            "pixel_attention_mask": torch.ones(1, count, dtype=torch.int64),
            "spatial_shapes": torch.tensor([[PATCHES, PATCHES]]),
        }
        yield "patches", lambda n: {"pixel_values": noise(n, 1, count, sizes.pixels), **shapes}
    if "image_position_ids" in names:
        grid = torch.cartesian_prod(torch.arange(PATCHES), torch.arange(PATCHES)).flip(1)

        def with_positions(patch_size: int, number: int) -> Tensors:
            pixels = noise(number, 1, count, sizes.channels * patch_size**2)
            return {"pixel_values": pixels, "image_position_ids": grid[None]}

        for patch_size in (sizes.patch, sizes.whole_patch):
            yield "positions", partial(with_positions, patch_size)


def _tiles(sizes: _Sizes, names: set[str], *, has_tiles: bool) -> Iterator[Form]:
    # Images of one size, or tiles of it.
    image_size, square = sizes.image_size, sizes.square
    size = torch.tensor([[image_size, image_size]])
    if has_tiles:
        yield "tiles", lambda n: {"pixel_values": square(n, 1, 2), "image_sizes": size}
    if "pixel_attention_mask" in names:
        masks = (
            torch.ones(1, 1, image_size, image_size, dtype=torch.int64),
            torch.ones(1, 1, dtype=torch.bool),
        )

        def masked(mask: torch.Tensor, number: int) -> Tensors:
            return {"pixel_values": square(number, 1, 1), "pixel_attention_mask": mask}

        for mask in masks:
            yield "masked", partial(masked, mask)
    if "high_res_pixel_values" in names:
        yield (
            "two resolutions",
            lambda n: {
                "pixel_values": square(n, 1),
                "high_res_pixel_values": square(n, 1, image_size=sizes.high_image_size),
            },
        )
    if "image_sizes" in names:
        yield "native", lambda n: {"pixel_values": square(n, 1), "image_sizes": size}
    yield "square", lambda n: {"pixel_values": square(n, 1)}
    yield "flat", lambda n: {"pixel_values": noise(n, 1, PATCHES**2, sizes.pixels)}
    yield "one tile", lambda n: {"pixel_values": square(n, 1, 1)}


def _first(config: Any, *names: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and value:
            return value
    return 0


def audio_forms(model: Any) -> Iterator[Form]:
    """Forms of audio, of which the first that a model takes is its own."""
    config = model.config
    audio = next((v for n in AUDIO_CONFIGS if (v := getattr(config, n, None))), config)
    mels = getattr(audio, "num_mel_bins", None) or 80
    frames = STRIDE * (getattr(audio, "max_source_positions", None) or 16)
    names = inspect.signature(model.forward).parameters

    def masked(mask: str, number: int) -> Tensors:
        # Features [1, M, F] of audio that is shorter for odd numbers.
        is_inside = torch.arange(frames)[None] < frames - 8 * (number % 2)
        return {"input_features": noise(number, 1, mels, frames), mask: is_inside.long()}

    for mask in MASKS:
        if mask in names:
            yield mask, partial(masked, mask)
    yield "whole", lambda number: {"input_features": noise(number, 1, mels, frames)}


def noise(number: int, *shape: int) -> torch.Tensor:
    """Normal values, the same for the same number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(shape, generator=generator)
