"""The operands of the products that add up to logits, their gradients, and full logits.

S tokens, C those of a chunk; V entries of the local vocabulary; K the contracted dimension of a
product.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from penstock_kernels.cross_entropy.gradients import (
    Scale,
    WeightGradient,
    largest,
    scaled_product_,
)
from penstock_kernels.packed_linear import is_packed, packed_linear

Product = tuple[torch.Tensor, torch.Tensor]
"""Rows [S, K] and a matrix [V, K]."""

ALL = slice(None)


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
    # `to` copies nothing where the dtype is the same.
    cast = [operand.to(sides[0].dtype) for operand in sides]
    return Sides(cast[::2], cast[1::2])


def precise(x: torch.Tensor) -> torch.dtype:
    """The dtype of sums over the vocabulary."""
    return torch.promote_types(x.dtype, torch.float32)


def linear_logits(products: Sequence[Product]) -> torch.Tensor:
    """The sum of products `x_i @ w_i.T`, [S, V], in fp32 (fp64 of fp64).

    Products are computed and rounded in the dtype of the first's rows, to which everything else is
    cast.

    PyTorch gives a product's output and its gradient one dtype. In bf16 the gradients of a mean's
    logits, such as (probability - 1) / 513, would be rounded as if 1/513 were 1/512. So logits are
    fp32, and their gradient is divided by its maximum, rounded, and multiplied by that maximum in
    fp32 after the matmul.
    """
    if len(products) == 1 and not torch.is_grad_enabled() and _is_copied(*products[0]):
        return packed_linear(*products[0]).to(precise(products[0][0]))
    return _Logits.apply(*seen_by_autograd(products))


def _is_copied(rows_SK: torch.Tensor, matrix_VK: torch.Tensor) -> bool:
    """Whether a copy of the matrix in the dtype of the rows outlives this product: a packed one, or
    that of autocast, which keeps it until its outermost context ends."""
    kind = rows_SK.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind) == rows_SK.dtype
    return is_packed(matrix_VK)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *sides: torch.Tensor) -> torch.Tensor:
        first_SK, first_VK = sides[:2]
        logits_SV = first_SK.new_empty(len(first_SK), len(first_VK))
        with torch.autocast(first_SK.device.type, enabled=False):
            computed(sides).multiplied(ALL, logits_SV)
        ctx.save_for_backward(*sides)
        return logits_SV.to(precise(first_SK))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sides = ctx.saved_tensors
        dtype = sides[0].dtype
        scale = largest(grads[0]) if dtype != grads[0].dtype else 1.0
        gradients = SideGradients(ctx.needs_input_grad, sides, 1, scale)
        slope_SV = (grads[0] / scale).to(dtype)
        gradients.add(ALL, slope_SV, computed(sides))
        return tuple(gradients.take())
