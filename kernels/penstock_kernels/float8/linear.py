"""A linear layer with FP8 matmuls, forward and backward.

T rows of x, K columns in, N out.
"""

# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import torch

from penstock_kernels.float8.custom_op import float8_linear
from penstock_kernels.float8.float8_matrix import Float8Matrix
from penstock_kernels.float8.matmuls import (
    ALONE,
    AmaxReduceGroups,
    Float8Recipe,
    gradients,
    outputs,
)
from penstock_kernels.float8.weight import Float8WeightShard


def linear(
    x: torch.Tensor,
    weight_NK: torch.Tensor,
    scheme: Float8Recipe,
    agreement: AmaxReduceGroups = ALONE,
) -> torch.Tensor:
    """`x W^T`, [..., N], of x [..., K] in its dtype, float32 or bfloat16, which is also the dtype
    of gradients.

    Compiled, it is one custom operator, and its gradients another; scales shared by ranks are then
    not supported.

    Raises:
        ValueError: x has other columns than W, or they are not whole blocks.
    """
    columns = weight_NK.shape[-1]
    if weight_NK.dim() != 2 or x.shape[-1] != columns:
        raise ValueError(f"x is {tuple(x.shape)}, and the matrix {tuple(weight_NK.shape)}")
    if scheme.block and columns % scheme.block:
        raise ValueError(f"{columns} columns are not whole blocks of {scheme.block}")
    x_TK = x.reshape(-1, columns)
    if torch.compiler.is_compiling():
        assert agreement == ALONE
        # FSDP gathers in FP8 only where layers are not compiled.
        assert not isinstance(weight_NK, Float8WeightShard)
        y_TN = float8_linear(x_TK, weight_NK, scheme)
    else:
        y_TN = _Linear.apply(x_TK, weight_NK, scheme, agreement)
    # FSDP warns about views.
    return y_TN if x.dim() == 2 else y_TN.unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        scheme: Float8Recipe,
        agreement: AmaxReduceGroups,
    ) -> torch.Tensor:
        ctx.scheme, ctx.agreement = scheme, agreement
        y_TN, x, weight = outputs(x_TK, weight_NK, scheme, agreement)
        # Per-tensor codes serve both directions; other recipes quantize again.
        ctx.keeps_codes = x.sharing == "tensor" and scheme.weight_gradient == "quantized"
        saved = (x.codes, x.scales) if ctx.keeps_codes else (x_TK, None)
        learns = ctx.needs_input_grad[1]
        ctx.save_for_backward(weight_NK, weight.scales, *(saved if learns else (None, None)))
        return y_TN

    @staticmethod
    def backward(ctx: Any, dy_TN: torch.Tensor) -> tuple[Any, ...]:
        weight_NK, scales, x, x_scales = ctx.saved_tensors
        if x is not None and ctx.keeps_codes:
            x = Float8Matrix(x, x_scales, "tensor")
        needs_grad = ctx.needs_input_grad[:2]
        results = gradients(
            dy_TN, x, weight_NK, scales, ctx.scheme, ctx.agreement, needs_grad=needs_grad
        )
        return *results, None, None
