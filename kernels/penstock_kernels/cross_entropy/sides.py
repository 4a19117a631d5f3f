"""The operands of the products that add up to logits, and their gradients.

S tokens, C those of a chunk; V entries of the local vocabulary; K the contracted dimension of a
product.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from penstock_kernels.cross_entropy.gradients import Scale, WeightGradient, scaled_product_

Product = tuple[torch.Tensor, torch.Tensor]
"""Rows [S, K] and a matrix [V, K]."""


class Sides(NamedTuple):
    """The operands of the products, in the dtype of the matmul."""

    rows: list[torch.Tensor]
    matrices: list[torch.Tensor]

    def multiplied(self, rows: slice, out_CV: torch.Tensor) -> torch.Tensor:
        """The sum of the products of these rows, in out."""
        first, *further = zip(self.rows, self.matrices, strict=True)
        torch.mm(first[0][rows], first[1].t(), out=out_CV)
        for x_SK, matrix_VK in further:
            torch.addmm(out_CV, x_SK[rows], matrix_VK.t(), out=out_CV)
        return out_CV


class SideGradients:
    """Gradients of the operands that require one, accumulated over chunks."""

    def __init__(
        self,
        needs_grad: Sequence[bool],
        sides: Sequence[torch.Tensor],
        num_chunks: int,
        scale: Scale,
    ) -> None:
        """`sides` are the unconverted operands, rows and matrix of one product after another; true
        gradients are `scale` times those that are added.
        """
        dtype = sides[0].dtype
        self._scale = scale
        self._dtypes = [x_SK.dtype for x_SK in sides[::2]]
        self._rows = [
            torch.empty_like(x_SK, dtype=dtype) if wants else None
            for x_SK, wants in zip(sides[::2], needs_grad[::2], strict=True)
        ]
        self._matrices = [
            WeightGradient(matrix_VK, dtype, num_chunks, scale) if wants else None
            for matrix_VK, wants in zip(sides[1::2], needs_grad[1::2], strict=True)
        ]

    def add(self, rows: slice, slope_CV: torch.Tensor, sides: Sides) -> None:
        """Add the gradients of a chunk."""
        for found_SK, matrix_VK in zip(self._rows, sides.matrices, strict=True):
            if found_SK is not None:
                scaled_product_(found_SK[rows], slope_CV, matrix_VK, self._scale)
        for gradient, x_SK in zip(self._matrices, sides.rows, strict=True):
            if gradient is not None:
                gradient.add(slope_CV, x_SK[rows])

    def take(self) -> list[torch.Tensor | None]:
        """Gradients of rows and matrix of one product after another, in their dtypes. Call once."""
        gradients: list[torch.Tensor | None] = []
        for found_SK, dtype, matrix in zip(self._rows, self._dtypes, self._matrices, strict=True):
            gradients.append(None if found_SK is None else found_SK.to(dtype))
            gradients.append(None if matrix is None else matrix.take())
        return gradients


def seen_by_autograd(products: Sequence[Product]) -> list[torch.Tensor]:
    """Rows and matrix of one product after another; detached if gradients are disabled."""
    # `needs_input_grad` is true under `no_grad`, too.
    sides = [operand for product in products for operand in product]
    return sides if torch.is_grad_enabled() else [operand.detach() for operand in sides]


def computed(sides: Sequence[torch.Tensor]) -> Sides:
    """The operands, cast to the dtype of the first rows."""
    cast = [operand.to(sides[0].dtype) for operand in sides]
    return Sides(cast[::2], cast[1::2])


def precise(x: torch.Tensor) -> torch.dtype:
    """The dtype of sums over the vocabulary."""
    return torch.promote_types(x.dtype, torch.float32)
