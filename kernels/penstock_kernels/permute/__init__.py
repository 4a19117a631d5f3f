"""MoE permute and unpermute: sort tokens by expert, and sum the experts' outputs."""

import torch

from penstock_kernels.op import Op, needs_cuda, triton_backend
from penstock_kernels.permute.reference import Order
from penstock_kernels.permute.reference import permute as _permute
from penstock_kernels.permute.reference import sort_by_expert as _sort
from penstock_kernels.permute.reference import unpermute as _unpermute

__all__ = ["Order", "permute", "sort_by_expert", "unpermute"]


def _unsupported_permute(x_TD: torch.Tensor, order: Order) -> str | None:
    if x_TD.dim() != 2 or x_TD.shape[0] != order.row_of_copy.shape[0]:
        return f"x is {tuple(x_TD.shape)} and the order of {order.row_of_copy.shape[0]} tokens"
    return needs_cuda(x_TD, order.copy_of_row)


def _unsupported_unpermute(
    y_RD: torch.Tensor, weights_TK: torch.Tensor | None, order: Order
) -> str | None:
    if y_RD.dim() != 2 or y_RD.shape[0] != order.copy_of_row.shape[0]:
        return f"y is {tuple(y_RD.shape)} and the order of {order.copy_of_row.shape[0]} rows"
    if weights_TK is None:
        return needs_cuda(y_RD, order.row_of_copy)
    if weights_TK.shape != order.row_of_copy.shape:
        chosen = tuple(order.row_of_copy.shape)
        return f"weights are {tuple(weights_TK.shape)} and the order of {chosen} choices"
    return needs_cuda(y_RD, weights_TK, order.row_of_copy)


def _unsupported_sort(choice_TK: torch.Tensor, num_experts: int) -> str | None:
    if choice_TK.dim() != 2 or num_experts < 1:
        return f"choices are {tuple(choice_TK.shape)} of {num_experts} experts"
    return needs_cuda(choice_TK)


sort_by_expert = Op(
    "sort_by_expert",
    _sort,
    triton_backend("permute.order_triton:sort_by_expert", _unsupported_sort),
    reference_name="eager",
)
permute = Op(
    "permute",
    _permute,
    triton_backend("permute.triton:permute", _unsupported_permute),
    reference_name="eager",
)
unpermute = Op(
    "unpermute",
    _unpermute,
    triton_backend("permute.triton:unpermute", _unsupported_unpermute),
    reference_name="eager",
)
