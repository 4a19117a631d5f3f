"""The experts of an MoE layer as one operation: rows are read by index in the products, which also
add biases and compute gates."""

import torch

from penstock_kernels.expert_mlp.reference import Gate
from penstock_kernels.expert_mlp.reference import expert_mlp as _reference
from penstock_kernels.group_gemm.shapes import unsupported_shapes
from penstock_kernels.op import Op, needs_cuda, triton_backend
from penstock_kernels.permute import Order

__all__ = ["Gate", "expert_mlp"]


def _unsupported_reason(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor | None,
    order: Order,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
    _: Gate,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> str | None:
    if reason := unsupported_shapes(x_TD, gate_up_E2FD, order.counts):
        return reason
    E, N, D = gate_up_E2FD.shape
    if down_EDF.shape != (E, D, N // 2) or N % 2 or down_EDF.dtype != x_TD.dtype:
        down = f"{tuple(down_EDF.shape)} in {down_EDF.dtype}"
        return f"gate_up is {tuple(gate_up_E2FD.shape)} in {x_TD.dtype} and down {down}"
    if x_TD.shape[0] != order.row_of_copy.shape[0]:
        return f"x is {tuple(x_TD.shape)} and the order of {order.row_of_copy.shape[0]} tokens"
    if weights_TK is not None and weights_TK.shape != order.row_of_copy.shape:
        chosen = tuple(order.row_of_copy.shape)
        return f"weights are {tuple(weights_TK.shape)} and the order of {chosen} choices"
    if (gate_up_bias is None) != (down_bias is None):
        return "one of the matrices has a bias"
    return needs_cuda(x_TD, gate_up_E2FD, down_EDF, order.counts)


expert_mlp = Op(
    "expert_mlp",
    _reference,
    triton_backend("expert_mlp.triton:expert_mlp", _unsupported_reason),
    reference_name="eager",
)
