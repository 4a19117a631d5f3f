"""Gradients of group_gemm from two products, which each fast implementation brings.

T rows, G groups, K contracted and N resulting columns.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Products(NamedTuple):
    """What a fast implementation can do: sums in fp32, results in the inputs' dtype."""

    by_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """`(x_TK, weight_GNK, counts_G)` to [T, N]: each row by its group's matrix, zeros past them."""
    of_groups: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """`(a_TM, b_TN, counts_G)` to [G, M, N]: `a^T b` over each group's rows, zeros without rows."""


class _GroupGemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        weight_GNK: torch.Tensor,
        counts_G: torch.Tensor,
        products: Products,
    ) -> torch.Tensor:
        for_x, for_weight, *_ = ctx.needs_input_grad
        # Rows are as large as the activations: kept only where the matrices learn.
        kept_x = x_TK if for_weight else None
        ctx.save_for_backward(kept_x, weight_GNK if for_x else None, counts_G)
        ctx.products = products
        ctx.weight_is_transposed = weight_GNK.stride(-1) != 1 and weight_GNK.stride(-2) == 1
        return products.by_rows(x_TK, weight_GNK, counts_G)

    @staticmethod
    def backward(
        ctx: Any, dy_TN: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x_TK, weight_GNK, counts_G = ctx.saved_tensors
        dx_TK = dweight_GNK = None
        if weight_GNK is not None:
            dx_TK = ctx.products.by_rows(dy_TN, weight_GNK.mT, counts_G)
        if x_TK is not None:
            # Written in the weight's own layout, so that adding it to `grad` needs no copy.
            if ctx.weight_is_transposed:
                dweight_GNK = ctx.products.of_groups(x_TK, dy_TN, counts_G).mT
            else:
                dweight_GNK = ctx.products.of_groups(dy_TN, x_TK, counts_G)
        return dx_TK, dweight_GNK, None, None


def multiply(
    x_TK: torch.Tensor, weight_GNK: torch.Tensor, counts_G: torch.Tensor, products: Products
) -> torch.Tensor:
    """`group_gemm` by `products`; gradients that nobody asks for are not computed."""
    return _GroupGemm.apply(x_TK, weight_GNK, counts_G, products)
