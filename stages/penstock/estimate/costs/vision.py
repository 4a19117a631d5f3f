"""Rough costs of the vision part of a model that is trained on images. No torch.

Parameters are those that `models.vision.sizes` counts. FLOPs are of these matrices, without
attention. Every rank that holds the vision part is assumed to compute the mean number of patches of
its rows; the ranks of a tensor- or context-parallel group divide the FLOPs, but each may have the
activations of all: a row may have a single image.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.schema.run import RunConfig
from penstock.models.vision.sizes import VisionSizes, read_sizes

SAVED_PER_LAYER = 16
"""Saved features of a patch in a layer of a tower without recomputation, in widths."""


@dataclass(frozen=True)
class VisionWork:
    """A vision part, and what a run does with it."""

    sizes: VisionSizes
    trains_tower: bool
    trains_projector: bool
    tokens_per_row: float
    """Mean image tokens of a packed row."""

    @property
    def patches_per_row(self) -> float:
        """Mean patches of a packed row."""
        return self.tokens_per_row * self.sizes.patches_per_token

    @property
    def parts(self) -> tuple[tuple[int, bool], tuple[int, bool]]:
        """Parameters of tower and projector, and whether they are trained."""
        sizes = self.sizes
        return (sizes.tower, self.trains_tower), (sizes.projector, self.trains_projector)

    def flops(self, rows: float) -> float:
        """FLOPs of a forward and backward pass over so many rows."""
        per_token = self.sizes.flops_per_token(
            trains_tower=self.trains_tower, trains_projector=self.trains_projector
        )
        return float(rows * self.tokens_per_row * per_token)


def vision_work(
    run: RunConfig, hf: Mapping[str, Any], image_tokens: int, rows: int
) -> VisionWork | None:
    """The work on images of a run whose `rows` have so many image tokens; None of a model without a
    vision part."""
    sizes = read_sizes(hf)
    if sizes is None:
        return None
    freeze = ("vision", "projector") if run.model.freeze is None else run.model.freeze
    learns = not run.lora.enable_lora
    return VisionWork(
        sizes,
        learns and "vision" not in freeze,
        learns and "projector" not in freeze,
        image_tokens / max(1, rows),
    )
