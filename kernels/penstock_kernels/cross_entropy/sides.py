"""The sides of products that add up to logits, and their gradients.

S tokens, C those of a chunk; V entries of the vocabulary that are here; K the width that a product
is summed over.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from penstock_kernels.cross_entropy.gradients import Scale, WeightGradient, scaled_product_

Product = tuple[torch.Tensor, torch.Tensor]
"""Rows [S, K] and a matrix [V, K]."""


class Sides(NamedTuple):
    """Those of the products, in the dtype in which they are multiplied."""

    rows: list[torch.Tensor]
    matrices: list[torch.Tensor]

    def multiplied(self, rows: slice, out_CV: torch.Tensor) -> torch.Tensor:
        """The sum of the products of these rows, in out."""
        first, *others = zip(self.rows, self.matrices, strict=True)
        torch.mm(first[0][rows], first[1].t(), out=out_CV)
        for x_SK, matrix_VK in others:
            torch.addmm(out_CV, x_SK[rows], matrix_VK.t(), out=out_CV)
        return out_CV


class SideGradients:
    """Those of the products' sides that want one, from the slopes of one chunk after another."""

    def __init__(
        self,
        wanted: Sequence[bool],
        sides: Sequence[torch.Tensor],
        num_chunks: int,
        scale: Scale,
    ) -> None:
        """sides are as they were given, rows and matrix of one product after another; slopes are
        scale times as steep as those that are added."""
        dtype = sides[0].dtype
        self._scale = scale
        self._dtypes = [x_SK.dtype for x_SK in sides[::2]]
        self._rows = [
            torch.empty_like(x_SK, dtype=dtype) if wants else None
            for x_SK, wants in zip(sides[::2], wanted[::2], strict=True)
        ]
        self._matrices = [
            WeightGradient(matrix_VK, dtype, num_chunks, scale) if wants else None
            for matrix_VK, wants in zip(sides[1::2], wanted[1::2], strict=True)
        ]

    def add(self, rows: slice, slope_CV: torch.Tensor, sides: Sides) -> None:
        """What follows from the slopes of a chunk."""
        for found_SK, matrix_VK in zip(self._rows, sides.matrices, strict=True):
            if found_SK is not None:
                scaled_product_(found_SK[rows], slope_CV, matrix_VK, self._scale)
        for found, x_SK in zip(self._matrices, sides.rows, strict=True):
            if found is not None:
                found.add(slope_CV, x_SK[rows])

    def take(self) -> list[torch.Tensor | None]:
        """Rows' and matrix's of one product after another, in their dtypes. To be called once."""
        taken: list[torch.Tensor | None] = []
        for found_SK, dtype, found in zip(self._rows, self._dtypes, self._matrices, strict=True):
            taken.append(None if found_SK is None else found_SK.to(dtype))
            taken.append(None if found is None else found.take())
        return taken


def seen_by_autograd(products: Sequence[Product]) -> list[torch.Tensor]:
    """Rows and matrix of one product after another; without a graph, nobody wants gradients."""
    sides = [side for product in products for side in product]
    return sides if torch.is_grad_enabled() else [side.detach() for side in sides]


def computed(sides: Sequence[torch.Tensor]) -> Sides:
    """As they are multiplied: in the dtype of the first rows."""
    cast = [side.to(sides[0].dtype) for side in sides]
    return Sides(cast[::2], cast[1::2])


def precise(x: torch.Tensor) -> torch.dtype:
    """What sums over the vocabulary are computed in."""
    return torch.promote_types(x.dtype, torch.float32)
