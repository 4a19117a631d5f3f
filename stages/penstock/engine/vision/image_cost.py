"""The work on images, by which packed rows are balanced over replicas beside their tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.schema.run import RunConfig
from penstock.engine.vision.freeze import frozen_parts
from penstock.models.decoder_config import DecoderConfig
from penstock.models.flops import flops_per_pair
from penstock.models.vision.sizes import read_sizes
from penstock.rows.batches import Integers
from penstock.rows.reader import PackedRows


@dataclass(frozen=True)
class ImageCost:
    """FLOPs of the vision part for an image, in whole numbers: the same on every machine."""

    per_token: int
    """For each of its tokens: matrices, and attention in tiles."""
    per_squared_token: int
    """For each of its squared tokens: attention among all of its patches."""
    unit: int
    """FLOPs of the unit in which costs of rows are compared (`models.flops.pairs_per_token`)."""

    def row_costs(self, rows: PackedRows) -> Integers:
        tokens, squares = rows.image_tokens()
        return (self.per_token * tokens + self.per_squared_token * squares) // self.unit


def build_image_cost(
    run: RunConfig, hf_config: Mapping[str, Any], config: DecoderConfig, *, images: bool
) -> ImageCost | None:
    """The cost of images in a run; None without images, or if their features are stored, or for a
    vision part whose sizes are not known.

    Ranks of a tensor- or context-parallel group share the images as they share the tokens.
    """
    sizes = read_sizes(hf_config) if images and not run.data.encode_images else None
    if sizes is None:
        return None
    frozen, learns = frozen_parts(run), not run.lora.enable_lora
    trains_tower = learns and "vision" not in frozen
    trains_projector = learns and "projector" not in frozen
    of_pair = sizes.attention_flops(trains_tower=trains_tower)
    per_token = sizes.flops_per_token(trains_tower=trains_tower, trains_projector=trains_projector)
    squared = of_pair * sizes.patches_per_token**2
    if sizes.tile is not None:
        per_token, squared = per_token + of_pair * sizes.patches_per_token * sizes.tile, 0
    return ImageCost(per_token, squared, flops_per_pair(config))
