"""Group GEMM as custom operators with gradients, built from the two products of each backend.

T rows, G groups, K contracted and N output columns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from penstock_kernels.custom_op import operator

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Products(NamedTuple):
    """The products of a backend: accumulated in fp32, results in the inputs' dtype."""

    by_rows: Product
    """`(x_TK, weight_GNK, counts_G)` to [T, N]: each row by its group's matrix, zeros past them."""
    of_groups: Product
    """`(a_TM, b_TN, counts_G)` to [G, M, N]: `a^T b` over each group's rows, zeros without rows."""


def operators(name: str, by_rows: Product, of_groups: Product) -> Products:
    """The two products of the backend `name` as custom operators.

    `by_rows` has gradients, computed with both; unneeded ones are not computed.
    """

    def back(ctx: Any, dy_TN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TK, weight_GNK, counts_G = ctx.saved_tensors
        dx_TK = dweight_GNK = None
        if weight_GNK is not None:
            dx_TK = products.by_rows(dy_TN, weight_GNK.mT, counts_G)
        if x_TK is not None:
            # In the weight's own memory layout, so that accumulating into `grad` needs no copy.
            if ctx.weight_is_transposed:
                dweight_GNK = products.of_groups(x_TK, dy_TN, counts_G).mT
            else:
                dweight_GNK = products.of_groups(dy_TN, x_TK, counts_G)
        return dx_TK, dweight_GNK, None

    products = Products(
        operator(
            f"group_gemm_by_rows_{name}", by_rows, fake=_by_rows_fake, keep=_keep, backward=back
        ),
        operator(f"group_gemm_of_groups_{name}", of_groups, fake=_of_groups_fake),
    )
    return products


def _by_rows_fake(
    x_TK: torch.Tensor, weight_GNK: torch.Tensor, counts_G: torch.Tensor
) -> torch.Tensor:
    del counts_G
    return x_TK.new_empty(x_TK.shape[0], weight_GNK.shape[1])


def _of_groups_fake(a_TM: torch.Tensor, b_TN: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    return a_TM.new_empty(counts_G.shape[0], a_TM.shape[1], b_TN.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    x_TK, weight_GNK, counts_G = inputs
    for_x, for_weight, *_ = ctx.needs_input_grad
    # Rows are as large as the activations: saved only if the matrices are trained.
    ctx.save_for_backward(x_TK if for_weight else None, weight_GNK if for_x else None, counts_G)
    ctx.weight_is_transposed = weight_GNK.stride(-1) != 1 and weight_GNK.stride(-2) == 1
