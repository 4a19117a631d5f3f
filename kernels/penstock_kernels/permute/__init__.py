"""MoE permute and unpermute: sort tokens by expert, and sum the experts' outputs."""

from collections.abc import Mapping

import torch

from penstock_kernels.op import HAS_TRITON, KernelImpl, Op, needs_cuda
from penstock_kernels.permute.order import Order
from penstock_kernels.permute.order import sort_by_expert as _sort
from penstock_kernels.permute.reference import permute as _permute
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


_SORT: Mapping[str, KernelImpl[[torch.Tensor, int], Order]] = {}
_PERMUTE: Mapping[str, KernelImpl[[torch.Tensor, Order], torch.Tensor]] = {}
_UNPERMUTE: Mapping[str, KernelImpl[[torch.Tensor, torch.Tensor | None, Order], torch.Tensor]] = {}
if HAS_TRITON:
    from penstock_kernels.permute.order_triton import sort_by_expert as _triton_sort
    from penstock_kernels.permute.triton import permute as _triton_permute
    from penstock_kernels.permute.triton import unpermute as _triton_unpermute

    _SORT = {"triton": KernelImpl(_triton_sort, _unsupported_sort, language="triton")}
    _PERMUTE = {"triton": KernelImpl(_triton_permute, _unsupported_permute, language="triton")}
    _UNPERMUTE = {
        "triton": KernelImpl(_triton_unpermute, _unsupported_unpermute, language="triton")
    }

sort_by_expert = Op("sort_by_expert", _sort, _SORT, reference_name="eager")
permute = Op("permute", _permute, _PERMUTE, reference_name="eager")
unpermute = Op("unpermute", _unpermute, _UNPERMUTE, reference_name="eager")
